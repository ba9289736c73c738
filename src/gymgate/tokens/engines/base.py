"""The interface of engines, token ids in and token ids with logprobs out, and a Python function as an engine."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from gymgate.core.errors import TokenDataError

FinishReason = Literal["stop", "length", "abort"]

NEUTRAL: Final[Mapping[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
    "seed": None,
}
"""Parameters that shape what is drawn, each with the value that leaves the model's distribution unchanged. One seed for all
rollouts of a row would make them all the same."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens that an engine sampled after a prompt."""

    token_ids: list[int]
    """Sampled ids, the stop token included where the engine returns it."""
    logprobs: list[float] | None
    """Natural logarithm of each sampled id's probability; `None` if the engine gives none."""
    finish_reason: FinishReason
    policy_version: tuple[int, int] | None = None
    """Lowest and highest version of the weights that sampled it, where the engine knows."""


class Engine(Protocol):
    """Samples a continuation. One engine serves many rollouts at once."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """Sample after `prompt_ids`.

        `sampling` holds the OpenAI and vLLM names (`temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, `seed`, `stop`,
        `stop_token_ids`, ...). Calls with the same `session` belong to one rollout and profit from one replica's cache.
        `sample_resuming` checks that ids and logprobs fit together, and turns an error of another kind than gymgate's into
        a `PolicyError`.
        """
        ...


Function = Callable[[list[int], dict[str, Any]], Sample | Awaitable[Sample]]


class CallableEngine:
    """Samples with `function(prompt_ids, sampling)`, which returns a `Sample` or an awaitable of one.

    A function that is not async runs on the event loop: one that takes long should be async.
    """

    def __init__(self, function: Function) -> None:
        self.function = function

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`."""
        answer = self.function(list(prompt_ids), dict(sampling))
        sample = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(sample, Sample):
            raise TokenDataError(f"the policy function returned {type(sample).__name__}, not a Sample")
        return sample
