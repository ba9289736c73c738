"""A Hugging Face causal language model in this process, with requests batched as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymgate.core.errors import MissingExtraError, PolicyError
from gymgate.tokens.engines.base import NEUTRAL, Sample

if TYPE_CHECKING:
    import torch

_GENERATE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_REFUSED = ("stop", "presence_penalty", "frequency_penalty", "logit_bias")
DEFAULT_MAX_TOKENS = 256


@dataclass
class _Request:
    prompt_ids: list[int]
    sampling: dict[str, Any]
    done: asyncio.Future[Sample]

    @property
    def max_tokens(self) -> int:
        return int(self.sampling.get("max_tokens") or DEFAULT_MAX_TOKENS)


class HuggingFaceEngine:
    """Samples with `model.generate`; waiting requests with equal sampling parameters are generated together.

    `model` is a causal LM, or a function that returns the current one, since a trainer may swap it. Requests that arrive
    during a batch form the next one; each ends at its own `max_tokens`. A batch ends early when nobody waits for its
    requests any more. Generation runs in a worker thread, in eval mode and without gradients; afterwards each module has
    the mode that it had. Logprobs are of the distribution at the requested temperature, before top-k,
    top-p and min-p cut it; trainers recompute these. An answer ends at any of `stop_token_ids`. `stop` strings are
    refused, because they would cut text and not ids, and so are parameters that `generate` does not have. A request with a
    seed is generated alone. For one event loop.
    """

    def __init__(
        self,
        model: Any | Callable[[], Any],
        *,
        pad_token_id: int = 0,
        max_batch: int = 64,
        version: Callable[[], int] | None = None,
    ) -> None:
        try:
            import torch as _torch  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                "HuggingFaceEngine needs torch and transformers: pip install torch transformers"
            ) from error
        self._model = model if callable(model) and not hasattr(model, "generate") else (lambda: model)
        self.pad_token_id = pad_token_id
        self.max_batch = max_batch
        self._version = version
        self._waiting: list[_Request] = []
        self._batch: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`."""
        if refused := [name for name in _REFUSED if sampling.get(name)]:
            raise PolicyError(
                f"HuggingFaceEngine does not support {', '.join(refused)};"
                " answers end at stop_token_ids or max_tokens",
                retryable=False,
            )
        request = _Request(list(prompt_ids), dict(sampling), asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await request.done

    async def stop(self) -> None:
        """Fail the requests that are left with a `PolicyError`, and return when the model is no longer in use."""
        for request in [*self._waiting, *self._batch]:
            if not request.done.done():
                request.done.set_exception(PolicyError("sampling was stopped", retryable=False))
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def _work(self) -> None:
        await asyncio.sleep(0)  # let callers that are ready now join the first batch
        while self._waiting:
            self._batch = self._waiting
            try:
                batch = self._batch = self._next_batch()
                samples = await asyncio.to_thread(self._sample, batch)
            except Exception as error:
                for request in self._batch:
                    if not request.done.done():
                        request.done.set_exception(error)
                continue
            for request, sample in zip(batch, samples, strict=True):
                if not request.done.done():
                    request.done.set_result(sample)

    def _next_batch(self) -> list[_Request]:
        """The oldest waiting request and those that can be generated with it.

        A row that has ended is padded until the batch ends, so the longest prompt and the longest answer of a batch must
        fit together: positions beyond the model's last one fail, or change how it sees every row.
        """
        self._waiting = [request for request in self._waiting if not request.done.done()]
        batch: list[_Request] = []
        positions, longest, most = _positions(self._model()), 0, 0
        for request in self._waiting:
            if batch and _batch_key(request) != _batch_key(batch[0]):
                continue
            prompt, answer = max(longest, len(request.prompt_ids)), max(most, request.max_tokens)
            if not batch or (positions is None or prompt + answer <= positions):
                batch.append(request)
                longest, most = prompt, answer
            if len(batch) == self.max_batch:
                break
        self._waiting = [request for request in self._waiting if request not in batch]
        return batch

    def _sample(self, batch: list[_Request]) -> list[Sample]:
        import torch
        from transformers import StoppingCriteriaList

        if not batch:
            return []
        model, sampling = self._model(), batch[0].sampling
        version = self._version
        before = version() if version else 0
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in _left_padded(batch, self.pad_token_id).items()}
        stops = list(sampling.get("stop_token_ids") or [])
        seed, accelerators = sampling.get("seed"), [] if device.type == "cpu" else [device]
        # The trainer and later requests go on with the random numbers that they would have had.
        own_numbers = torch.random.fork_rng(
            accelerators, enabled=seed is not None, device_type=device.type if accelerators else "cuda"
        )
        with torch.no_grad(), _evaluating(model), own_numbers:
            if seed is not None:
                torch.manual_seed(seed)
            output = model.generate(
                **inputs,
                **_generate_arguments(sampling),
                max_new_tokens=max(request.max_tokens for request in batch),
                stopping_criteria=StoppingCriteriaList([_ended(batch, inputs["input_ids"].shape[1])]),
                min_new_tokens=sampling.get("min_tokens") or None,
                eos_token_id=stops or None,
                pad_token_id=self.pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
            )
        start = inputs["input_ids"].shape[1]
        temperature = sampling.get("temperature", 1.0) or 1.0
        sampled = output.sequences[:, start:]
        steps = [torch.log_softmax(logits.float() / temperature, -1) for logits in output.logits]
        chosen = torch.stack([step.gather(1, sampled[:, i : i + 1])[:, 0] for i, step in enumerate(steps)], 1)
        rows = zip(sampled.tolist(), chosen.tolist(), strict=True)
        versions = (before, version()) if version else None
        return [
            _cut(ids[: request.max_tokens], logprobs[: request.max_tokens], stops, versions)
            for request, (ids, logprobs) in zip(batch, rows, strict=True)
        ]


def _batch_key(request: _Request) -> str:
    """Requests with equal keys may share a call of `generate`; one with a seed is generated alone."""
    if request.sampling.get("seed") is not None:
        return f"alone {id(request)}"
    shared = {name: value for name, value in request.sampling.items() if name != "max_tokens"}
    return json.dumps(shared, sort_keys=True)


def _positions(model: Any) -> int | None:
    """Return the number of a model's positions, if its config has it."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def _ended(batch: Sequence[_Request], width: int) -> Callable[..., torch.Tensor]:
    """A stopping criterion: rows with as many ids after `width` as they may have, and rows that nobody waits for."""
    import torch

    def ended(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        count = input_ids.shape[1] - width
        rows = [count >= request.max_tokens or request.done.done() for request in batch]
        return torch.tensor(rows, device=input_ids.device)

    return ended


def _generate_arguments(sampling: Mapping[str, Any]) -> dict[str, Any]:
    # Each is given: `generate` takes one that is not from the model's generation_config.
    chosen = {name: NEUTRAL[name] if sampling.get(name) is None else sampling[name] for name in _GENERATE}
    if chosen["temperature"] == 0:
        return {"do_sample": False, "repetition_penalty": chosen["repetition_penalty"]}
    return {"do_sample": True, **chosen, "top_k": max(0, chosen["top_k"]), "min_p": chosen["min_p"] or None}


def _left_padded(batch: Sequence[_Request], pad: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, each (batch, longest prompt)."""
    import torch

    width = max(len(request.prompt_ids) for request in batch)
    gaps = [width - len(request.prompt_ids) for request in batch]
    ids = [[pad] * gap + request.prompt_ids for gap, request in zip(gaps, batch, strict=True)]
    mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _cut(
    ids: list[int], logprobs: list[float], stops: Sequence[int], versions: tuple[int, int] | None
) -> Sample:
    """A row up to and including its first stop token; what follows is padding."""
    for position, token in enumerate(ids):
        if token in stops:
            return Sample(ids[: position + 1], logprobs[: position + 1], "stop", versions)
    return Sample(ids, logprobs, "length", versions)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
