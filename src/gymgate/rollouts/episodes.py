"""From an environment server's answer to `/run` to its episode's result, or to the failure that it reports. Pure functions."""

from __future__ import annotations

from typing import Any, NamedTuple

from gymgate.core.errors import (
    EnvironmentBusyError,
    EnvironmentServerError,
    GymgateError,
    PolicyError,
    RolloutTimeoutError,
)
from gymgate.rollouts.breakdowns import counts_as_zero
from gymgate.rollouts.result import JUDGE_KINDS, error_fields, one_line, without_trajectories

FLAT_CLASS = "environment_server_failed"
"""The `_ng_failure_class` of a failure that is reported without an envelope."""
TIMED_OUT, TIMED_OUT_KIND = "Episode timed out", "agent_timeout"
"""NeMo Gym's words for an episode that took too long, and its kind for an agent that did."""


class EpisodeFailure(NamedTuple):
    """A failure that an environment server handled and reports with status 200."""

    reason: str
    terminal: bool
    """Whether it says that another attempt would fail too."""
    kind: str | None = None
    stage: str | None = None
    """`admission`, `seed`, `agent`, `verification` or `cleanup`; `None`: it does not know."""
    partial: dict[str, Any] | None = None
    """The agent's answer, if it gave one."""


def read_episode(answer: dict[str, Any], rollout_id: str) -> dict[str, Any] | EpisodeFailure:
    """Return the result in an answer, or the failure that it reports. An answer without an envelope is a result itself.

    Raises `ValueError` for an envelope of another episode, and for one without exactly one of the two.
    """
    if answer.get("_ng_failure_class") == FLAT_CLASS and not counts_as_zero(answer):
        fields = ("message", "terminal", "kind", "stage", "partial_response")
        return _failure(*(answer.get(f"_ng_failure_{name}") for name in fields))
    episode = answer.get("episode_id")
    if not isinstance(episode, dict) or not {"result", "failure"} & answer.keys():
        return answer
    if (episode.get("rollout_id"), episode.get("attempt", 0)) != (rollout_id, 0):
        raise ValueError(f"it answered for episode {str(episode)[:80]}")
    result, failure = answer.get("result"), answer.get("failure")
    if isinstance(failure, dict) and result is None:
        fields = ("failure_reason", "terminal", "failure_kind", "stage", "partial_response")
        return _failure(*(failure.get(name) for name in fields))
    if isinstance(result, dict) and failure is None:
        return result
    raise ValueError("its answer must have a result or a failure, as objects, and not both")


def _failure(reason: Any, terminal: Any, kind: Any, stage: Any, partial: Any) -> EpisodeFailure:
    return EpisodeFailure(
        str(reason or "it gives no reason"),
        bool(terminal),
        kind if isinstance(kind, str) else None,
        stage if isinstance(stage, str) else None,
        partial if isinstance(partial, dict) else None,
    )


def failure_error(failure: EpisodeFailure, server: str) -> GymgateError:
    """Return the error of a rollout whose environment server reports a failure."""
    stage = f", stage {one_line(failure.stage)}" if failure.stage else ""
    message = f"environment server {server!r}{stage}: {one_line(failure.reason)}"
    if failure.kind in JUDGE_KINDS:
        return PolicyError(f"its judge failed: {message}", retryable=not failure.terminal)
    if failure.stage == "admission":
        return EnvironmentBusyError(message, server=server)
    if failure.kind == TIMED_OUT_KIND or failure.reason == TIMED_OUT:
        return RolloutTimeoutError(message)
    return EnvironmentServerError(message, server=server)


def failed_episode_fields(failure: EpisodeFailure, server: str) -> dict[str, Any]:
    """Return the fields of a rollout whose environment server reports a failure, with what its agent had answered."""
    fields = error_fields(failure_error(failure, server), judge=failure.kind in JUDGE_KINDS)
    if failure.terminal:
        fields["error"] |= {"terminal": True, "retryable": False}
    return fields | partial_fields(failure)


def partial_fields(failure: EpisodeFailure) -> dict[str, Any]:
    """Return the result of a failed rollout: its agent's answer, if it gave one."""
    if failure.partial is None:
        return {}
    result = {"response": failure.partial}
    without_trajectories(result)
    return {"result": result}
