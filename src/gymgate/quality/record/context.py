"""The context of the measurements: a running environment, rollouts that can be run again, and its processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from gymgate.core.config import CallableEndpoint
from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gateway.replay.backend import make_response
from gymgate.gateway.replay.conversation import Item
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.gym.catalog import EnvConfig, Environment
from gymgate.quality.model import CheckRequest, RowResult
from gymgate.quality.recorded_models import RecordedJudge
from gymgate.quality.recordings import RecordedRow, RowData, packaged_rows
from gymgate.quality.replay import Replayer
from gymgate.quality.reward_trial import IGNORANT, cohort_size
from gymgate.quality.sections import Oracle
from gymgate.rollouts import Rollout, outcome_of
from gymgate.stack import Stack
from gymgate.stack.workers import workers_of

if TYPE_CHECKING:
    from gymgate.quality.record.probes import Subject

MAX_REPLAYS = 20
"""Rollouts that are run again and again, at most."""
MAX_CALLS = 20
"""Policy calls of a rollout whose answers are not recorded."""
OWN_JUDGE = "its judge is the policy's own model"
NO_JUDGE_ANSWERS = "its judge has no recorded answers for this; give its endpoint with `--judge`"


class Unmeasured(Exception):
    """Something cannot be measured here; its text says why."""


@dataclass(frozen=True)
class ReplayCase:
    """A rollout that can be run again: a row, and the policy's answers."""

    name: str
    row: RowData
    policy: Callable[[], PolicyCallable]
    """Makes a policy that gives the answers from the beginning."""
    origin: RecordedRow | None = None
    """The recorded rollout that it replays; `None` for a packaged row."""
    replayed: float | None = None
    """Reward of the replay that the verdict is from; `None` for a packaged row."""
    stand_in: bool = False
    """Whether it only gets a reward with a fixed text as the judge's answer."""


@dataclass
class MeasurementContext:
    """A running environment after its recordings were replayed."""

    stack: Stack
    request: CheckRequest
    environment: Environment
    config: EnvConfig
    replayer: Replayer
    judge: RecordedJudge
    recorded: Sequence[RecordedRow]
    results: Sequence[RowResult]
    ready_s: float
    has_recorded_judge: bool = False
    """Whether a recorded judge was asked since the context was made."""
    policy_was_judge: bool = False
    """Whether the policy's own model was asked as the judge of the last rollout."""
    judged_itself: bool = False
    """Whether that was a made-up policy."""
    oracle: Oracle | None = None
    """What right answers earn, once that was measured."""
    trials: Sequence[Subject] = ()
    """The rows whose right answers were tried."""
    _names: Any = field(default_factory=itertools.count)

    @cached_property
    def rows(self) -> list[RowData]:
        """The packaged rows."""
        return packaged_rows(self.environment, config=self.config)

    @cached_property
    def replays(self) -> list[ReplayCase]:
        """The recorded rollouts that got a reward; if there are none, packaged rows with one fixed answer."""
        self.refuse_cohorts()
        pairs = zip(self.recorded, self.results, strict=False)
        replays = [
            replace(self.replay_of(recorded), replayed=None if result.status == "masked" else result.reward)
            for recorded, result in pairs
            if result.rewarded
        ]
        if not replays and self.replayer.trial.rewarded:
            replays = [
                ReplayCase(
                    f"row {n}",
                    row,
                    partial(constant_policy, IGNORANT),
                    stand_in=self.replayer.trial.by_stand_in,
                )
                for n, row in enumerate(self.rows)
            ]
        if not replays:
            raise Unmeasured("no rollout of it gets a reward here")
        return replays[:MAX_REPLAYS]

    def refuse_cohorts(self) -> None:
        """Raise `Unmeasured` if the environment scores rollouts against each other."""
        if cohort_size(self.config) > 1:
            raise Unmeasured("its rollouts are scored against each other")

    def replay_of(self, recorded: RecordedRow) -> ReplayCase:
        return ReplayCase(
            recorded.name, recorded.row, partial(self.replayer.policy_for, recorded.recording), recorded
        )

    async def run(self, replay: ReplayCase, policy: PolicyCallable | None = None, **limits: Any) -> Rollout:
        """Run it alone, with its recorded judge."""
        record = replay.origin.recording.raw if replay.origin else None
        self.judge.begin(record, stand_in=replay.stand_in)
        return await self._run(replay, policy, **limits)

    async def run_without_judge(
        self, replay: ReplayCase, policy: PolicyCallable | None = None, **limits: Any
    ) -> Rollout:
        """Run it alone, with a judge that has no answers."""
        self.judge.begin(None)
        return await self._run(replay, policy, **limits)

    async def run_all(self, replays: Sequence[ReplayCase], at_once: int) -> list[Rollout]:
        """Run them with so many at once, without a judge or with the stand-in for it."""
        self.judge.begin(None, stand_in=any(replay.stand_in for replay in replays))
        free = asyncio.Semaphore(at_once)

        async def run(replay: ReplayCase) -> Rollout:
            async with free:
                return await self._run(replay, None)

        return await asyncio.gather(*map(run, replays))

    async def _run(self, replay: ReplayCase, policy: PolicyCallable | None, **limits: Any) -> Rollout:
        agent = replay.origin.agent if replay.origin else None
        with self._serve(policy or replay.policy()) as endpoint:
            rollout = await self.replayer.run(replay.row, endpoint, agent, **limits)
        self.has_recorded_judge = self.has_recorded_judge or self.judge.judged_by == "recorded"
        is_made_up = policy is not None or replay.origin is None
        self.policy_was_judge = any(call.model_server == POLICY_AS_JUDGE for call in rollout.calls)
        self.judged_itself = self.policy_was_judge and is_made_up
        return rollout

    @property
    def judge_problem(self) -> str | None:
        """Why the last rollout has no judgement that means anything; `None` if it has one, or needs none."""
        if self.judged_itself:
            return OWN_JUDGE
        return NO_JUDGE_ANSWERS if self.judge.refused else None

    @contextmanager
    def _serve(self, policy: PolicyCallable) -> Iterator[CallableEndpoint]:
        name = f"measured-{next(self._names)}"
        try:
            yield self.stack.register(name, policy, dialect="responses")
        finally:
            self.stack.unregister(name)

    async def server_pids(self, kind: str) -> list[int]:
        """Processes of its servers of one kind, such as `resources_servers`; each of several workers."""
        [running] = (await self.stack.status())["environments"].values()
        names = [server.name for server in self.config.servers if server.kind == kind]
        return [worker["pid"] for name in names for worker in workers_of(running["servers"], name)]


def reward_of(rollout: Rollout) -> float | None:
    """The reward that counts; `None` if none does."""
    return outcome_of(rollout).reward if rollout.policy_calls else None


def constant_policy(text: str) -> PolicyCallable:
    """A policy that gives one answer to everything."""
    return computed_policy(lambda request: text)


def computed_policy(text: Callable[[dict[str, Any]], str]) -> PolicyCallable:
    """A policy that makes its answer of the request."""

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        return respond([message(text(request))], request)

    return answer


def respond(items: Sequence[Item], request: dict[str, Any]) -> dict[str, Any]:
    return make_response(items, request, response_id=f"resp_{time.monotonic_ns()}")


def message(text: str) -> Item:
    return {"type": "message", "role": "assistant", "content": text}
