"""`Score`: what is counted of a rollout, made once, of its record as it finished or of the line that a run holds of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.config import POLICY
from gymgate.rollouts import ModelCall
from gymgate.rollouts.answers import answer_of
from gymgate.rollouts.breakdowns import counts_as_zero
from gymgate.rollouts.no_answer import is_box_unread
from gymgate.rollouts.outcome import Outcome, number, outcome_of
from gymgate.rollouts.row import TaskKey
from gymgate.runs.described.plan import Order
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.record import CollectedRollout
from gymgate.runs.stored.tokens import StoredCall, Tokens, tokens_of_calls

ANSWER_KEYS = (
    "extracted_answer",
    "predicted_answer",
    "predicted_value",
    "extracted_label",
    "extracted_model_code",
    "extracted_code",
    "extracted_sql",
    "extracted_verdict",
    "extracted_judgement",
    "extracted_grade",
)
"""Fields of a result in which NeMo Gym's environments put the answer; the first that is there is taken."""
_ANSWERS = frozenset(ANSWER_KEYS)
NO_ANSWER = "no answer found"
UNREAD = "a box that math_verify could not read"
_LONGEST_ANSWER = 64
_ROUTE = re.compile(r"/ng-rollout/[^/\s]+")
"""Left out of messages: rollouts that differ only in their gateway URL were masked for one reason."""


class Score(NamedTuple):
    """What is counted of a rollout that finished, or of a failed attempt at one. `None` is not known."""

    task: TaskKey
    agent: str
    position: int
    """Of the row in the input."""
    source: str
    line: int
    order: Order
    outcome: Outcome
    is_no_number: bool
    """Whether its reward is not a finite number."""
    answer_key: str | None
    """The field of the result that holds the answer."""
    answer: str | None
    """What the environment took for the policy's answer, as a short text."""
    calls: int | None
    """How often the policy was called."""
    output_tokens: int | None
    """Tokens that the policy sampled; `None` if an answer did not say."""
    seconds: float | None
    tokens: Mapping[str, Tokens | None]
    """By model server; without calls those of the policy are unknown."""
    cause: str | None
    """Why it failed or was masked."""
    remark: str | None
    """`NO_ANSWER`, `UNREAD`, or the kind of a failure of the model's own, which counts as 0; else `None`."""
    failed_kind: str
    """Of a rollout that failed: `judge`, or the kind of its error."""
    input_tokens: int | None
    """Tokens of the policy's prompts; `None` if an answer did not say."""
    retries: int | None
    """How often calls were made again, to the policy or a judge."""
    limit: str | None = None
    """What cut a truncated rollout short, where that is known."""


def score_of(rollout: CollectedRollout | Attempt, answer_key: str | None = None) -> Score:
    """Return what is counted of a rollout; its answer is in `answer_key`, else in the first known field that it has."""
    result, error, reward = rollout.result or {}, rollout.error, rollout.reward
    keys = (answer_key,) if answer_key else ANSWER_KEYS if not _ANSWERS.isdisjoint(result) else ()
    answer_key = next((key for key in keys if key in result), None)
    fields = {"status": rollout.status, "limit": rollout.limit, "reward": reward, "error": None}
    outcome = outcome_of(fields if error is None else {**fields, "error": error.__dict__})
    cause = None if error is None else _line(f"{error.type}: {error.message}")
    if error is None and outcome.reason == "masked":
        cause = _why_masked(result)
    unread = UNREAD if outcome.reward == 0 and is_box_unread(result) else None
    calls = None if rollout.calls is None else rollout.policy_calls
    usage = rollout.usage if isinstance(rollout, Attempt) else None
    if usage is None:
        usage = {POLICY: None} if rollout.calls is None else tokens_of_calls(rollout.calls)
    return Score(
        task=rollout.task_key,
        agent=rollout.agent,
        position=rollout.task,
        source=rollout.source,
        line=rollout.line,
        order=rollout.identity.order,
        outcome=outcome,
        is_no_number=reward is not None and number(reward) is None,
        answer_key=answer_key,
        answer=None if answer_key is None else short_answer(result[answer_key]),
        calls=None if calls is None else len(calls),
        output_tokens=_tokens(calls, usage.get(POLICY), "output_tokens"),
        seconds=None if rollout.timing is None else rollout.timing.total_s,
        tokens=usage,
        cause=cause,
        remark=_own_failure(result) or (NO_ANSWER if rollout.answer_found is False else unread),
        failed_kind="unknown" if error is None else "judge" if error.judge else error.kind,
        input_tokens=_tokens(calls, usage.get(POLICY), "input_tokens"),
        retries=None if rollout.calls is None else sum(map(_retries, rollout.calls)),
        limit=rollout.limit or _incomplete_reason(result) if rollout.status == "truncated" else None,
    )


def expected_answer(result: Mapping[str, Any] | None) -> Any:
    """Return the right answer, where a result repeats its row's; else `None`."""
    answer = answer_of(result or {})
    return None if answer is None else answer.value


def extracted_answer(result: Mapping[str, Any] | None, answer_found: bool | None) -> Any:
    """Return what the environment took for the policy's answer, `none` if it found none; `None` where its result does not say."""
    if answer_found is False:
        return "none"
    return next((value for key in ANSWER_KEYS if (value := (result or {}).get(key)) is not None), None)


def short_answer(value: Any) -> str | None:
    """Return an answer as a short text; equal answers stay equal."""
    if value is None:
        return None
    text = value if isinstance(value, str) else codec.dumps(value, sort_keys=True).decode()
    return text if len(text) <= _LONGEST_ANSWER else hashlib.sha256(text.encode()).hexdigest()


def _why_masked(result: Mapping[str, Any]) -> str:
    kind, why = result.get("failure_kind") or "no reason given", result.get("failure_reason") or ""
    return _line(f"masked: {kind} {_ROUTE.sub('', str(why))}")


def _incomplete_reason(result: Mapping[str, Any]) -> str | None:
    """Return why the last answer of the policy is incomplete, such as `max_output_tokens`."""
    response = result.get("response")
    details = response.get("incomplete_details") if isinstance(response, Mapping) else None
    reason = details.get("reason") if isinstance(details, Mapping) else None
    return _line(reason) if isinstance(reason, str) else None


def _own_failure(result: Mapping[str, Any]) -> str | None:
    return _line(str(result.get("_ng_failure_class") or "no kind given")) if counts_as_zero(result) else None


def _line(text: str) -> str:
    """What is printed below a table, on one line: an answer's own lines could be taken for the table's."""
    return " ".join(text.split())


def _retries(call: StoredCall | ModelCall) -> int:
    retries = call.details.get("retries") if isinstance(call.details, Mapping) else None
    return retries if isinstance(retries, int) else 0


def _tokens(calls: Sequence[StoredCall | ModelCall] | None, stored: Tokens | None, name: str) -> int | None:
    """Return the policy's tokens; those of a failed attempt, whose calls are not stored, as its line says."""
    if calls is None:
        return (stored or {}).get(name)
    counts = [getattr(call.usage, name) for call in calls if not 400 <= (call.status_code or 0) < 500]
    numbers = [count for count in counts if count is not None]
    return sum(numbers) if len(numbers) == len(counts) else None
