"""From an agent's answer to `/run` to the fields of a `Rollout`. Pure functions over plain dicts."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from gymgate.core import codec
from gymgate.core.errors import (
    DataError,
    EnvironmentServerError,
    ErrorKind,
    GymgateError,
    JudgeError,
    PolicyError,
    RolloutTimeoutError,
)
from gymgate.rollouts.breakdowns import breakdown, counts_as_zero, is_masked
from gymgate.rollouts.outcome import number
from gymgate.rollouts.record import Limit, Rollout, RolloutError, RolloutStatus

TRAJECTORIES = ("ng_trajectory", "_ng_trajectory", "ng_agent_observations")
"""Gym's own copies of the conversation, which it makes because gymgate turns on the rollout's URL."""
JUDGE_KINDS = frozenset({"judge_failed", "judge_unparseable"})
"""Gym's kinds of failures of a judge."""
PARTS = ("reward_components", "verifier_rewards")
PART_PREFIX = "reward_"
LONGER = 4
"""An agent's answer repeats the row and what was said in it: it may be so many times as long as a call."""
MAX_MESSAGE = 600
_LOOKED_AT = 20 * MAX_MESSAGE
"""Characters at the start and at the end of what a server says."""
_PASSED_ON = re.compile(r"Hit an exception in \S+ calling an inner server: (b'.*'|b\".*\")", re.DOTALL)
_UNREADABLE = "Received an invalid response from model server"
"""What NeMo Gym's agents say of a model's answer that breaks their schema, which is stricter than that of endpoints."""
_NO_REWARD = re.compile(r"\breward\s+Input should be a valid number")
"""What an agent says of a result whose reward pydantic refuses."""

_KINDS: tuple[tuple[type[GymgateError], ErrorKind], ...] = (
    (RolloutTimeoutError, "timeout"),
    (PolicyError, "policy"),
    (DataError, "data"),
    (EnvironmentServerError, "environment"),
)


def read_result(body: bytes, *, key: str, rollout_id: str) -> dict[str, Any] | None:
    """Return the agent's answer; `None` if it is not a JSON object, or nested too deeply.

    The rollout's public id replaces its secret key wherever that occurs. Raises `ValueError` for an answer of too many values.
    """
    body = body.replace(key.encode(), codec.dumps(rollout_id)[1:-1])
    try:
        result, _ = codec.parse_bounded(body, times=LONGER)
    except codec.TooLargeError as error:
        raise ValueError(f"its answer {error}") from error
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def interpret_result(
    result: Mapping[str, Any],
    row: bytes = b"{}",
    *,
    agent: str = "",
    agent_type: str | None = None,
    limit: Limit | None = None,
) -> dict[str, Any]:
    """Return status, reward and limit of an agent's answer to a row; status and error if it reports a breakdown.

    An agent that broke down over a limit was truncated, and its reward is a placeholder.
    """
    reason = breakdown(result, agent_type)
    if reason is not None or counts_as_zero(
        result
    ):  # read the row only now: it is rarely needed, and may be large
        request = codec.loads(row)
        if counts_as_zero(result, request):
            return score_fields({**result, "reward": 0.0}, limit)
        reason = breakdown(result, agent_type, request)
    if reason is None:
        return score_fields(result, limit)
    if limit is not None:
        return {"status": "truncated", "limit": limit}
    return error_fields(EnvironmentServerError(f"agent {agent!r} reports a failure: {reason}", server=agent))


def score_fields(result: Mapping[str, Any], limit: Limit | None = None) -> dict[str, Any]:
    """Return status, reward and limit of an agent's answer."""
    return {"status": status_of(result, limit), "reward": number(result.get("reward")), "limit": limit}


def status_of(result: Mapping[str, Any], limit: Limit | None = None) -> RolloutStatus:
    """Return the status of a result that reports no breakdown."""
    if is_masked(result):
        return "masked"
    return "truncated" if limit is not None or is_incomplete(result.get("response")) else "completed"


def measurement_fields(result: dict[str, Any], row: bytes, metadata_key: str) -> dict[str, Any]:
    """Take gymgate's routing out of the answer to a row, and return it with its reward parts and metrics.

    Fields of the row, which Gym repeats in its answer, measure nothing, whatever their value. Their names decide: by value,
    a metric would be missing only in the rollouts where it equals the row's number.
    """
    without_trajectories(result)
    for name in ("responses_create_params", "response"):
        part = result.get(name)
        metadata = part.get("metadata") if isinstance(part, dict) else None
        if isinstance(metadata, dict) and metadata.pop(metadata_key, None) is not None and not metadata:
            result[name].pop("metadata")
    names = [
        name for name in result if _measures(name) and (name in PARTS or number(result[name]) is not None)
    ]
    repeated = codec.loads(row) if names else {}  # only then: the row may be large
    measured = {name: result[name] for name in names if name not in repeated}
    return {"reward_parts": reward_parts(measured), "metrics": metrics(measured), "result": result}


def without_trajectories(result: dict[str, Any]) -> None:
    """Take Gym's own copies of the conversation out of a result, and out of its agent's answer."""
    response = result.get("response")
    for part in (result, response if isinstance(response, dict) else {}):
        for name in TRAJECTORIES:
            part.pop(name, None)


def reward_parts(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the objectives of an environment that has several, by Gym's name for each.

    They are the entries of `reward_components` or `verifier_rewards`, and the numbers called `reward_...`.
    """
    parts = {name: result[name] for name in result if name.startswith(PART_PREFIX)}
    for field in PARTS:
        value = result.get(field)
        parts |= value if isinstance(value, dict) else {}
    return {str(name): part for name, value in parts.items() if (part := number(value)) is not None}


def metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return every other finite number at the top level, without Gym's bookkeeping (`_ng_...`, `mask_sample`)."""
    return {
        name: value
        for name in result
        if _measures(name) and not name.startswith(PART_PREFIX)
        if (value := number(result[name])) is not None
    }


def _measures(name: str) -> bool:
    """Whether a field may hold a metric or parts of the reward: it is neither the reward nor NeMo Gym's bookkeeping."""
    return name not in ("reward", "mask_sample") and not name.startswith("_ng_")


def judge_failed(result: Mapping[str, Any]) -> bool:
    """Whether Gym says that it gave no real score because a judge could not be asked."""
    return "judge_failed" in (result.get("failure_kind"), result.get("_ng_failure_class"))


def is_incomplete(response: Any) -> bool:
    """Whether a limit ended the agent's last model call."""
    if not isinstance(response, dict):
        return False
    if response.get("incomplete_details"):
        return True
    metadata = response.get("metadata")
    # So nemo-gym 0.7's simple_agent marks an answer that the model ended by itself, without a message or a call.
    ended_itself = isinstance(metadata, dict) and "ng_termination_reason" in metadata
    return response.get("status") == "incomplete" and not ended_itself


def error_fields(error: GymgateError, *, judge: bool = False) -> dict[str, Any]:
    """Return status and error of a rollout that has no result."""
    return {"status": "failed", "error": rollout_error(error, judge=judge).model_dump()}


def rollout_error(error: GymgateError, *, judge: bool = False) -> RolloutError:
    """Return what a rollout's record says about the error that it failed with; `judge`: of another endpoint than the policy's."""
    kind: ErrorKind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), "infrastructure")
    return RolloutError.model_construct(
        kind=kind,
        message=error.message,
        type=(JudgeError if judge and type(error) is PolicyError else type(error)).__name__,
        server=getattr(error, "server", None) or getattr(error, "endpoint", None),
        status_code=getattr(error, "status_code", None),
        retryable=bool(getattr(error, "retryable", None) or kind in ("infrastructure", "timeout")),
        judge=judge,
    )


def failed_rollout(error: GymgateError, *, id: str = "", environment: str = "", agent: str = "") -> Rollout:
    """Return the record of a rollout that failed before the daemon reported anything about it."""
    return Rollout.model_construct(
        id=id, environment=environment, agent=agent, status="failed", error=rollout_error(error)
    )


def run_error(status: int, body: bytes, server: str, kind: str = "agent") -> GymgateError:
    """Return the error for a `/run` of an agent, or of a server of another kind, that answered with another status than 200."""
    answer = inner = _read(body)
    if status == 422:
        return DataError(f"{kind} {server!r} rejects the row: {one_line(answer)}")
    while (passed_on := _passed_on(inner)) is not None:
        inner = _read(passed_on)
    if isinstance(inner, str) and _UNREADABLE in inner:
        reason = f"it cannot read an answer of its model: {one_line(inner)}"
        return PolicyError(f"{kind} {server!r}: {reason}", retryable=False)
    if isinstance(inner, str) and _NO_REWARD.search(inner):
        reason = "its resources server gave no number as a reward, but None, NaN or something else"
        return EnvironmentServerError(f"{kind} {server!r}: {reason}", server=server, status_code=status)
    message = one_line(inner) if inner is answer else f"a server that it called failed: {one_line(inner)}"
    return EnvironmentServerError(
        f"{kind} {server!r}: HTTP {status}: {message}", server=server, status_code=status
    )


def _passed_on(answer: Any) -> bytes | None:
    """Return the answer of the server whose failure a server of Gym passes on, as `repr` wrote it; `None` if there is none."""
    match = _PASSED_ON.fullmatch(answer) if isinstance(answer, str) else None
    try:
        inner = ast.literal_eval(match[1]) if match else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deeply
        return None
    return inner if isinstance(inner, bytes) else None


def error_line(body: bytes) -> str:
    """Return an error body in one line: FastAPI's list of complaints, Gym's JSON string, or whatever there is."""
    return one_line(_read(body))


def _read(body: bytes) -> Any:
    try:
        return codec.parse_bounded(body)[0]
    except ValueError:
        return body.decode(errors="replace")


def one_line(value: Any) -> str:
    """Return what a server says as one line of at most `MAX_MESSAGE` characters, about: its start and its end."""
    if isinstance(value, dict) and "detail" in value:
        value = value["detail"]
    if isinstance(value, list):
        value = "; ".join(_complaint(item) for item in value)
    text = value if isinstance(value, str) else codec.dumps(value).decode()
    ends = text[:_LOOKED_AT] + text[_LOOKED_AT:][-_LOOKED_AT:]  # a split text takes thirty times its memory
    line = " ".join(ends.split())
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE // 2]} ... {line[-MAX_MESSAGE // 2 :]}"


def _complaint(item: Any) -> str:
    if not isinstance(item, dict) or "msg" not in item:
        return str(item)
    parts = item.get("loc")
    where = ".".join(str(part) for part in parts if part != "body") if isinstance(parts, list) else ""
    return f"{where}: {item['msg']}"
