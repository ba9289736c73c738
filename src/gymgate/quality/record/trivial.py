"""Not trivially rewarded: an empty answer, one fixed sentence, the prompt and another row's best answer earn nothing."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gateway.replay.conversation import blocks_of, items_of
from gymgate.quality.probe import IGNORANT
from gymgate.quality.record.context import (
    MAX_CALLS,
    MeasurementContext,
    ReplayCase,
    Unmeasured,
    computed_policy,
    constant_policy,
    reward_of,
)
from gymgate.quality.record.schema import ANSWERS, NO_REWARD, AnswerRewards, Trivial
from gymgate.quality.recordings import RecordedRow

ROWS = 10


async def measure(context: MeasurementContext) -> Trivial:
    context.refuse_cohorts()
    replays = list(_rows(context))
    if not replays:
        raise Unmeasured("it has no rows")
    answers: dict[str, AnswerRewards] = {}
    missing: dict[str, str] = {}
    for name in ANSWERS:
        policies = [
            (replay, policy) for replay in replays if (policy := _policy(name, replay, context.recorded))
        ]
        if not policies:
            missing[name] = "no other row has a recorded answer with a reward above 0"
        elif isinstance(outcome := await _rewards(context, policies), AnswerRewards):
            answers[name] = outcome
        else:
            missing[name] = outcome
    recorded = [row.recording.reward for row in context.recorded if row.recording.reward is not None]
    return Trivial(
        recorded_mean=statistics.fmean(recorded) if recorded else None, answers=answers, missing=missing
    )


def _rows(context: MeasurementContext) -> Iterator[ReplayCase]:
    """The recorded rows, each once, then packaged ones: up to `ROWS`.

    A recorded row that lacks what scoring needs is left out: without a reward it would say nothing of the environment.
    """
    seen: list[Any] = []
    verdicts = (result.verdict for result in context.results)
    for each, verdict in itertools.zip_longest(context.recorded, verdicts):
        if verdict == "incomplete":
            continue
        if each.row not in seen and len(seen) < ROWS and each.recording.turns:
            seen.append(each.row)
            yield context.replay_of(each)
    for row in context.rows:
        if row not in seen and len(seen) < ROWS:
            seen.append(row)
            yield ReplayCase("row", row, lambda: constant_policy(""))


async def _rewards(
    context: MeasurementContext, policies: list[tuple[ReplayCase, PolicyCallable]]
) -> AnswerRewards | str:
    """The rewards; why there are none, such as a judge that has no answer."""
    rewards: list[float] = []
    limited = False
    for replay, policy in policies:
        rollout = await context.run_without_judge(replay, policy, max_calls=MAX_CALLS)
        if (reason := context.judge_problem) is not None:
            return reason
        limited = limited or rollout.limit is not None
        if (reward := reward_of(rollout)) is not None:
            rewards.append(reward)
    if not rewards:
        return f"its rollouts go on after {MAX_CALLS} such answers" if limited else NO_REWARD
    return AnswerRewards(
        rows=len(rewards),
        failed=len(policies) - len(rewards),
        mean=statistics.fmean(rewards),
        highest=max(rewards),
        above_zero=sum(reward > 0 for reward in rewards),
    )


def _policy(name: str, replay: ReplayCase, recorded: list[RecordedRow] | Any) -> PolicyCallable | None:
    if name == "empty":
        return constant_policy("")
    if name == "fixed sentence":
        return constant_policy(IGNORANT)
    if name == "the prompt":
        return computed_policy(_prompt)
    prompt = _prompt(replay.row["responses_create_params"])
    others = [
        (row.recording.reward, text)
        for row in recorded
        if (row.recording.reward or 0) > 0
        and _prompt(row.row["responses_create_params"]) != prompt
        and (text := last_message(row))
    ]
    return constant_policy(max(others, key=lambda pair: pair[0] or 0)[1]) if others else None


def _prompt(request: dict[str, Any]) -> str:
    """The text of the user."""
    return "\n".join(block.text for block in blocks_of(items_of(request)) if block.role == "user")


def last_message(recorded: RecordedRow) -> str:
    """The text of the policy's last message; empty if it has none."""
    items = [item for turn in recorded.recording.turns for item in turn]
    texts = [
        block.text
        for item in items
        if item.get("type", "message") == "message"
        for block in blocks_of([item])
    ]
    return texts[-1] if texts else ""
