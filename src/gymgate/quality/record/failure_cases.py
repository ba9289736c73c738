"""Honest about failure: no reward where the judge, a tool or the policy failed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gymgate.gateway.backends.base import PolicyCallable
from gymgate.quality.record.context import (
    MAX_CALLS,
    OWN_JUDGE,
    MeasurementContext,
    ReplayCase,
    Unmeasured,
    constant_policy,
    message,
    respond,
)
from gymgate.quality.reward_trial import IGNORANT
from gymgate.quality.sections import CASES, Case, FailureCase, Failures, Outcome
from gymgate.rollouts import Rollout, outcome_of

ROLLOUTS = 3
"""Rollouts of each case."""
TOOL_TIMEOUT_S = 10.0
"""Seconds that a rollout may take whose resources server has stopped."""
AT_ONCE_S = 0.5
"""A tool call that is answered faster than this by a stopped server was not made there."""
LONG = IGNORANT + " " + "word " * 52_000


async def measure(context: MeasurementContext) -> Failures:
    context.refuse_cohorts()
    cases: dict[Case, FailureCase] = {}
    missing: dict[str, str] = {}
    for name in CASES:
        try:
            rollouts = await _RUN[name](context)
        except Unmeasured as error:
            missing[name] = str(error)
            continue
        cases[name] = _case(rollouts)
    return Failures(cases=cases, missing=missing)


async def _judge_down(context: MeasurementContext) -> list[Rollout]:
    """Rollouts whose judge was asked and was down."""
    rollouts = []
    for replay in _any(context):
        with context.judge.down():
            rollout = await context.run_without_judge(replay)
            if context.judge.calls:
                rollouts.append(rollout)
    if not rollouts:
        served = context.request.stack.models and "the calls go to the endpoint of --judge"
        raise Unmeasured(served or (OWN_JUDGE if context.policy_was_judge else "no judge is asked"))
    return rollouts


async def _tool_timeout(context: MeasurementContext) -> list[Rollout]:
    replays = [replay for replay in context.replays if replay.origin and replay.origin.recording.tool_calls]
    if not replays:
        raise Unmeasured("no recorded rollout with a reward calls a tool")
    pids = await context.server_pids("resources_servers")
    with _Stopping(replays[0].policy(), pids) as stopping:
        rollout = await context.run(replays[0], stopping, timeout_s=TOOL_TIMEOUT_S)
    if stopping.answered_s is not None and stopping.answered_s < AT_ONCE_S:
        raise Unmeasured("it has no resources server with its tools")
    return [rollout]


async def _answer(policy: PolicyCallable, request: dict[str, Any]) -> Any:
    answer = policy(request)
    return await answer if isinstance(answer, Awaitable) else answer


class _Stopping:
    """Stops the servers when the policy calls a tool, until the policy is asked again."""

    def __init__(self, policy: PolicyCallable, pids: Sequence[int]) -> None:
        self._policy = policy
        self._servers: list[int] = []
        """Descriptors of the processes: a server that ended meanwhile may have left its number to another process."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._servers.append(os.pidfd_open(pid))
        self._stopped: float | None = None
        self.answered_s: float | None = None
        """Seconds until the agent asked its policy again although they were stopped."""

    def __enter__(self) -> _Stopping:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        for server in self._servers:
            os.close(server)

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._stopped is not None and self.answered_s is None:
            self.answered_s = time.monotonic() - self._stopped
            self.go_on()
        answer: dict[str, Any] = await _answer(self._policy, request)
        if self._stopped is None and any(item["type"] == "function_call" for item in answer["output"]):
            self._signal(signal.SIGSTOP)
            self._stopped = time.monotonic()
        return answer

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for server in self._servers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(server, number)


async def _cut_off(context: MeasurementContext) -> list[Rollout]:
    """Rollouts that ended by themselves after their last answer was cut, and whose judge could be asked."""
    rollouts = []
    reason = "its rollouts end before the answer that would be cut"
    for replay in context.replays[:ROLLOUTS]:
        cut = _Cut(replay)
        rollout = await context.run(replay, cut, max_calls=cut.last + MAX_CALLS)
        if context.judge_problem is not None:
            reason = context.judge_problem
        elif cut.half is None:
            continue
        elif rollout.limit is not None and _reward(rollout) is None:
            reason = f"its rollouts go on after {MAX_CALLS} cut answers"
        else:
            rollouts.append(rollout)
    if not rollouts:
        raise Unmeasured(reason)
    return rollouts


class _Cut:
    """Gives a replay's answers, of the last one only the first half, and says that a limit ended it."""

    def __init__(self, replay: ReplayCase) -> None:
        self._policy = replay.policy()
        self.last = len(replay.origin.recording.steps) if replay.origin else 1
        self.half: str | None = None
        """Half of the last answer, once that was given. It is given again to an agent that goes on."""
        self._calls = 0

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        if self.half is None:
            answer: dict[str, Any] = await _answer(self._policy, request)
            if self._calls < self.last:
                return answer
            text = "".join(
                part.get("text", "")
                for item in answer["output"]
                if item["type"] == "message"
                for part in item["content"]
            )
            self.half = text[: len(text) // 2]
        cut = respond([message(self.half)], request)
        return {**cut, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


async def _long_answer(context: MeasurementContext) -> list[Rollout]:
    rollouts = []
    for replay in context.replays[:ROLLOUTS]:
        rollout = await context.run_without_judge(replay, constant_policy(LONG), max_calls=ROLLOUTS)
        if (reason := context.judge_problem) is not None:
            raise Unmeasured(reason)
        if rollout.limit is None or _reward(rollout) is not None:
            rollouts.append(rollout)
    if not rollouts:
        raise Unmeasured(f"its rollouts go on after {ROLLOUTS} such answers")
    return rollouts


def _any(context: MeasurementContext) -> list[ReplayCase]:
    """Recorded rollouts whether or not they get a reward here; packaged rows with a fixed answer if there are none."""
    recorded = [context.replay_of(row) for row in context.recorded if row.recording.turns]
    packaged = [ReplayCase("row", row, lambda: constant_policy(IGNORANT)) for row in context.rows]
    if not recorded and not packaged:
        raise Unmeasured("it has no rows")
    return (recorded or packaged)[:ROLLOUTS]


_RUN: dict[Case, Callable[[MeasurementContext], Awaitable[list[Rollout]]]] = {
    "judge_down": _judge_down,
    "tool_timeout": _tool_timeout,
    "cut_off": _cut_off,
    "long_answer": _long_answer,
}


def _case(rollouts: Sequence[Rollout]) -> FailureCase:
    outcomes: dict[Outcome, int] = {}
    for rollout in rollouts:
        outcomes[_outcome(rollout)] = outcomes.get(_outcome(rollout), 0) + 1
    errors = [
        f"{rollout.error.type}: {rollout.error.message}" for rollout in rollouts if rollout.error is not None
    ]
    return FailureCase(
        outcomes=outcomes,
        rewards=tuple(reward for rollout in rollouts if (reward := _reward(rollout)) is not None),
        said=errors[0][:300] if errors else "",
    )


def _reward(rollout: Rollout) -> float | None:
    """The reward that the environment gave, also where gymgate does not count it."""
    return rollout.error.reward_given if rollout.error is not None else outcome_of(rollout).reward


def _outcome(rollout: Rollout) -> Outcome:
    outcome = outcome_of(rollout)
    if _reward(rollout) is None:
        return "masked" if outcome.reason == "masked" else "error"
    return "truncated" if outcome.reason in ("truncated", "overflowed") else "number"
