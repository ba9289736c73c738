"""The scorer: NeMo Gym's reward. A rollout without one is unscored, never 0."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState

from gymgate.core import codec
from gymgate.integrations.inspect.solver import ROLLOUT_KEY
from gymgate.rollouts import outcome_of
from gymgate.rollouts.answers import answer_of, calls_in
from gymgate.rollouts.transcript import items_of, text_of
from gymgate.runs.counted.account import part_of
from gymgate.runs.stored.score import NO_ANSWER, extracted_answer


@scorer(metrics=[mean(), stderr()])  # type: ignore[untyped-decorator]
def reward() -> Scorer:
    """Score by NeMo Gym's reward; its parts and Gym's metrics are in the score's metadata."""

    async def score(state: TaskState, target: Target) -> Score:
        return score_of(
            state.store.get(ROLLOUT_KEY), state.output.completion, state.metadata.get("row") or {}
        )

    return score


def target_of(*rows: Mapping[str, Any]) -> str:
    """Return the right answer that the first of these rows has, or results that repeat a row; empty without one."""
    answer = next((answer for row in rows if (answer := answer_of(row))), None)
    if answer is None:
        return ""
    return text_of([*map(_shown, calls_in(answer.value))] or answer.value)


def _graded_calls(result: Mapping[str, Any], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the policy's calls of tools if the right answer is such calls."""
    right = answer_of(result) or answer_of(row)
    if right is None or not calls_in(right.value):
        return []
    said = (item for item in items_of(result)[1] if item.get("type") == "function_call")
    return [_shown(item) for item in said]


def _shown(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in one form, whether the right one or the policy's."""
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = codec.loads(arguments.encode(errors="replace"))
    return {"name": call.get("name"), "arguments": arguments}


def score_of(
    rollout: Mapping[str, Any] | None, answer: str, row: Mapping[str, Any] = MappingProxyType({})
) -> Score:
    """Return the score of a rollout's record; `None` is a sample that a limit of Inspect's ended before Gym scored it.

    `answer` is what the policy said last, for environments that do not say which answer they took from it, and whose `row` does
    not have calls of tools as its right answer: there it is the policy's calls, if it made any.
    """
    if rollout is None:
        return Score.unscored(reason="no_result", explanation="ended before NeMo Gym scored it")
    result = outcome_of(rollout)
    details = {
        "status": rollout["status"],
        "reward_parts": rollout.get("reward_parts") or {},
        "metrics": rollout.get("metrics") or {},
    }
    limit = f" ({rollout['limit']})" if rollout.get("limit") else ""
    found = rollout.get("answer_found")
    if (extracted := extracted_answer(rollout.get("result"), found)) is not None:
        answer = str(extracted)
    elif calls := _graded_calls(rollout.get("result") or {}, row):
        answer = text_of(calls)
    remark = NO_ANSWER if found is False else None
    part = "" if remark is None else f": {remark}"
    if result.reward is None:
        return Score.unscored(
            reason=result.reason, answer=answer, explanation=f"{result.reason}{limit}{part}", metadata=details
        )
    if result.reason == "completed" and (result.reward <= 0 or result.reward >= 1):
        part = f": {part_of(result, remark)}"
    return Score(
        value=result.reward, answer=answer, explanation=f"{result.reason}{limit}{part}", metadata=details
    )
