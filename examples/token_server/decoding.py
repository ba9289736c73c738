"""A batch of sequences that share one key-value cache; rows join and leave between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


class DecodingBatch:
    """Left-padded rows of a causal LM with full attention. `logits` (rows, vocabulary) is for each row's next id."""

    def __init__(self, model: Any, sequences: Sequence[Sequence[int]]) -> None:
        width = max(len(ids) for ids in sequences)
        gaps = [width - len(ids) for ids in sequences]
        ids = torch.tensor([[0] * gap + list(row) for gap, row in zip(gaps, sequences, strict=True)])
        self.model = model
        self.cache = DynamicCache()
        self.mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
        self.logits = self._forward(ids, (self.mask.cumsum(1) - 1).clamp(min=0))

    def advance(self, tokens: Sequence[int]) -> None:
        """Append one id to every row."""
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.logits = self._forward(torch.tensor(tokens)[:, None], self.mask.sum(1, keepdim=True) - 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every other row, and columns that are padding in all of those left."""
        index = torch.tensor(rows)
        self.cache.batch_select_indices(index)
        self.mask, self.logits = self.mask[index], self.logits[index]
        first = int(self.mask.any(0).int().argmax())
        self.mask = self.mask[:, first:]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]

    def join(self, other: DecodingBatch) -> None:
        """Take over the rows of `other`, after those that are here."""
        width = max(self.mask.shape[1], other.mask.shape[1])
        pads = [width - batch.mask.shape[1] for batch in (self, other)]
        self.mask = _stack([self.mask, other.mask], pads, dim=1)
        self.logits = torch.cat([self.logits, other.logits])
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = _stack([mine.keys, theirs.keys], pads, dim=2)
            mine.values = _stack([mine.values, theirs.values], pads, dim=2)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


def _stack(tensors: Sequence[torch.Tensor], pads: Sequence[int], dim: int) -> torch.Tensor:
    """Rows of both, each padded with zeros at the start of dimension `dim`."""
    padded = []
    for tensor, pad in zip(tensors, pads, strict=True):
        sides = [0, 0] * (tensor.dim() - 1 - dim) + [pad, 0]
        padded.append(torch.nn.functional.pad(tensor, sides))
    return torch.cat(padded)
