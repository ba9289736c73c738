"""verl's own generation servers, through the `server_manager` that an agent loop is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gymgate.core.errors import TokenDataError
from gymgate.tokens.engines.base import FinishReason, Sample


class ServerManager(Protocol):
    """The method used of `AgentLoopBase.server_manager` (verl 0.9: `LLMServerClient`)."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any: ...


@dataclass(frozen=True)
class ServerManagerEngine:
    """Samples with `server_manager.generate`. The session is its request id, so a rollout stays with one server.

    `sampling` is passed on under vLLM's names, which verl's SGLang servers accept too. `logprobs` requests logprobs, as
    verl's `rollout.calculate_log_probs` does. Policy versions are verl's `min_global_steps` and `max_global_steps`.
    """

    server_manager: ServerManager
    logprobs: bool = True

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`."""
        parameters = {**sampling, "logprobs": self.logprobs}
        output = await self.server_manager.generate(
            request_id=session, prompt_ids=list(prompt_ids), sampling_params=parameters
        )
        return self._sample(output, sampling.get("max_tokens"))

    def _sample(self, output: Any, limit: int | None) -> Sample:
        token_ids = list(output.token_ids)
        logprobs = list(output.log_probs or []) or None  # its resuming client gives [] for None
        if self.logprobs and token_ids and logprobs is None:
            raise TokenDataError(
                "verl returned no log_probs; set actor_rollout_ref.rollout.calculate_log_probs=true"
            )
        finish = _finish(output.stop_reason, len(token_ids), limit)
        return Sample(token_ids, logprobs, finish, _versions(output.extra_fields))


def _finish(reason: str | None, count: int, limit: int | None) -> FinishReason:
    """verl's vLLM servers call both a stop and a full length "completed"; only the count tells them apart."""
    if reason in ("abort", "aborted"):
        return "abort"
    return "length" if reason == "length" or count == limit else "stop"


def _versions(fields: Mapping[str, Any]) -> tuple[int, int] | None:
    low = fields.get("min_global_steps", fields.get("global_steps"))
    high = fields.get("max_global_steps", fields.get("global_steps"))
    return (int(low), int(high)) if low is not None and high is not None else None
