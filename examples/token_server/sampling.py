"""One request for ids, and how its next id is drawn."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

FinishReason = Literal["stop", "length", "abort"]


class SamplingError(ValueError):
    """A sampling parameter that cannot be honoured."""


@dataclass(frozen=True)
class Sampling:
    """vLLM's names and defaults, except that `max_tokens` must be given."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], max_tokens: int) -> Sampling:
        """The fields of a request's body that decide what is sampled; `max_tokens` where it names none.

        Raises `SamplingError` for what vLLM honours and this server does not.
        """
        refused = ("logit_bias", "structured_outputs", "bad_words", "allowed_token_ids", "prompt_logprobs")
        if named := [name for name in refused if body.get(name)]:
            raise SamplingError(f"the token server does not implement {', '.join(named)}")
        if any(body.get(name) for name in ("presence_penalty", "frequency_penalty")):
            raise SamplingError("the token server does not implement presence_penalty and frequency_penalty")
        known = {name: body[name] for name in cls.__dataclass_fields__ if body.get(name) is not None}
        stop = known.get("stop", ())
        known["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        known["stop_token_ids"] = tuple(known.get("stop_token_ids", ()))
        parsed = cls(**{"max_tokens": max_tokens, **known})
        if parsed.temperature < 0 or not 0 < parsed.top_p <= 1 or parsed.max_tokens < 1:
            raise SamplingError(
                f"temperature={parsed.temperature}, top_p={parsed.top_p}, max_tokens={parsed.max_tokens}: "
                "need temperature >= 0, 0 < top_p <= 1, max_tokens >= 1"
            )
        return parsed


@dataclass
class Generation:
    """A request under way. `done` gets the generation itself once `finish_reason` is set."""

    prompt_ids: list[int]
    sampling: Sampling
    eos_token_id: int
    decode: Callable[[Sequence[int]], str]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    versions: tuple[int, int] | None = None
    aborted: bool = False
    done: concurrent.futures.Future[Generation] = field(default_factory=concurrent.futures.Future)

    def __post_init__(self) -> None:
        self._generator = None
        if self.sampling.seed is not None:
            self._generator = torch.Generator().manual_seed(self.sampling.seed % 2**63)

    def draw(self, logits: torch.Tensor, version: int) -> int:
        """Sample the next id from `logits` (vocabulary,), made by weights of that version, and record it."""
        distribution = torch.log_softmax(self._processed(logits.clone()), -1)
        if self.sampling.temperature == 0:
            token = int(distribution.argmax())
        else:
            token = int(torch.multinomial(distribution.exp(), 1, generator=self._generator))
        self.token_ids.append(token)
        self.logprobs.append(float(distribution[token]))
        if self.sampling.logprobs:
            values, indices = distribution.topk(min(self.sampling.logprobs, len(distribution)))
            self.top_logprobs.append(dict(zip(indices.tolist(), values.tolist(), strict=True)))
        low, _ = self.versions or (version, version)
        self.versions = (low, version)
        self.finish_reason = self._finished(token)
        return token

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits as sampled from: vLLM's `processed_logprobs` are their log-softmax."""
        chosen = self.sampling
        if len(self.token_ids) < chosen.min_tokens:
            logits[[self.eos_token_id, *chosen.stop_token_ids]] = -torch.inf
        if chosen.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*self.prompt_ids, *self.token_ids}))
            values = logits[seen]
            logits[seen] = torch.where(
                values > 0, values / chosen.repetition_penalty, values * chosen.repetition_penalty
            )
        if chosen.temperature > 0:
            logits = logits / chosen.temperature
        if 0 < chosen.top_k < len(logits):
            logits[logits < logits.topk(chosen.top_k).values[-1]] = -torch.inf
        if chosen.min_p > 0:
            probabilities = logits.softmax(-1)
            logits[probabilities < chosen.min_p * probabilities.max()] = -torch.inf
        if chosen.top_p < 1:
            ordered, indices = logits.softmax(-1).sort(descending=True)
            logits[indices[ordered.cumsum(-1) - ordered >= chosen.top_p]] = -torch.inf
        return logits

    def _finished(self, token: int) -> FinishReason | None:
        chosen = self.sampling
        stops = (*chosen.stop_token_ids, *(() if chosen.ignore_eos else (self.eos_token_id,)))
        if token in stops and len(self.token_ids) > chosen.min_tokens:
            return "stop"
        if chosen.stop and any(text in self.decode(self.token_ids) for text in chosen.stop):
            return "stop"
        return "length" if len(self.token_ids) >= chosen.max_tokens else None
