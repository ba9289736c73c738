"""What every engine offers: token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine sampled after a prompt."""

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
        Raises `PolicyError` if the engine fails and `TokenDataError` if its answer does not fit together.
        """
        ...
