"""A run from beginning to end: plan, directory, stack, rollouts. What `gymgate collect` and the Python API share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymgate.collection.limits import fitting_concurrency
from gymgate.collection.plan import Done, Identity, Job, Plan, Shard
from gymgate.collection.policy_wait import PolicyWait
from gymgate.collection.ray_stacks import RayStacks, ray_stacks
from gymgate.collection.record import CollectedRollout
from gymgate.collection.runner import Collector, Pace
from gymgate.collection.settings import extent_of, settings_of
from gymgate.collection.store import RunDirectory, open_run, run_directories
from gymgate.collection.tally import Tally
from gymgate.config import HTTPEndpoint, RolloutLimits, StackConfig
from gymgate.errors import ConfigError, StackLostError
from gymgate.rollout import Rollout
from gymgate.stack import Policy, Stack, acquire

Say = Callable[[str], None]


@dataclass
class Collection:
    """A run that is described and not started yet."""

    stack: StackConfig
    policy: Policy
    plan: Plan
    names: Sequence[str]
    """Of the sources, as settings show them."""
    output: Path | None = None
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    pace: Pace = field(default_factory=Pace)
    rerun_failed: bool = False
    record_bodies: bool = False
    ray: str | None = None
    """Address of a Ray cluster to run on; `None`: this machine."""
    wait_for_policy_s: float | None = None
    """For the policy's endpoint to answer, at the start and after failures of its; 0: it is asked once."""
    say: Say = lambda message: None
    tally: Tally = field(default_factory=Tally)
    collector: Collector | None = None
    """While it runs."""
    draining: bool = False

    @property
    def directory(self) -> Path | None:
        """Where this shard goes."""
        shard = self.plan.shard
        return self.output / shard.directory if self.output and shard.count > 1 else self.output

    async def run(
        self,
        *,
        on_rollout: Callable[[CollectedRollout], Any] | None = None,
        on_change: Callable[[Tally], None] = lambda tally: None,
        on_ready: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        """Everything that is left of the run. Raises what keeps it from starting or ends it early."""
        for error in self.plan.invalid:
            self.say(f"left out: {error}")
        async with contextlib.AsyncExitStack() as exits:
            directory = self._open(exits)
            skip = self._settled(directory)
            self._count(skip)
            if not self.tally.left:
                on_ready(self.tally)
                return
            await self._run_until_done(directory, skip, on_rollout, on_change, on_ready)

    async def _run_until_done(
        self,
        directory: RunDirectory | None,
        skip: _Settled,
        on_rollout: Callable[[CollectedRollout], Any] | None,
        on_change: Callable[[Tally], None],
        on_ready: Callable[[Tally], None],
    ) -> None:
        """A stack that is lost is started again, as long as rollouts finish in between."""
        policy_wait = PolicyWait(self.policy, self.wait_for_policy_s, self.say)
        await policy_wait.at_start()
        finished = -1
        while True:
            try:
                async with self._stacks() as stack:
                    self.collector = Collector(
                        self.plan.jobs(skip),
                        functools.partial(self._run_one, stack),
                        pace=self._fitting_pace(),
                        tally=self.tally,
                        directory=directory,
                        on_rollout=on_rollout,
                        on_change=on_change,
                        warn=self.say,
                        status=stack.status,
                        after_failure=policy_wait.after,
                    )
                    if self.draining:
                        self.collector.drain()
                    on_ready(self.tally)
                    return await self.collector.run()
            except StackLostError as error:
                if directory is None or self.draining or self.tally.finished <= finished:
                    raise
                finished = self.tally.finished
                self.say(f"{error}; starting it again")

    def _stacks(self) -> AbstractAsyncContextManager[Stack | RayStacks]:
        if self.ray is None:
            return acquire(self.stack, progress=self.say)
        return ray_stacks(self.ray, self.stack, self.pace.concurrency, self.say)

    def drain(self) -> None:
        """Start nothing more; `run` returns when what runs has finished."""
        self.draining = True
        if self.collector is not None:
            self.collector.drain()

    def _open(self, exits: contextlib.AsyncExitStack) -> RunDirectory | None:
        if self.directory is None or self.output is None:
            return None
        _refuse_other_split(self.output, self.plan.shard)
        settings = settings_of(self.stack, self.policy, self.limits, self.names)
        directory = exits.enter_context(open_run(self.directory, settings, extent_of(self.plan)))
        if directory.repaired:
            self.say(
                f"{self.directory}: cut off {directory.repaired} bytes of a line that a killed run left torn"
            )
        return directory

    def _settled(self, directory: RunDirectory | None) -> _Settled:
        if directory is None:
            return _Settled(Done(), set())
        if self.rerun_failed:
            directory.attempts.clear()
            directory.given_up.clear()
        return _Settled(directory.done, directory.given_up)

    def _count(self, skip: _Settled) -> None:
        self.tally.total = self.plan.total()
        if skip:
            self.tally.resumed = sum(1 for identity in self.plan.identities() if identity in skip)
            given_up = sum(1 for identity in self.plan.identities() if identity in skip.given_up)
            self.tally.given_up_before = given_up
            of = f"{self.tally.resumed - given_up} of {self.tally.total} rollouts are there already"
            failed = f", {given_up} failed for good (--rerun-failed tries them again)" if given_up else ""
            self.say(f"resuming {self.directory}: {of}{failed}")

    def _fitting_pace(self) -> Pace:
        fitting, note = fitting_concurrency(self.pace.concurrency)
        if note is None:
            return self.pace
        self.say(note)
        return Pace(**{**self.pace.__dict__, "concurrency": fitting})

    async def _run_one(self, stack: Stack | RayStacks, job: Job) -> Rollout:
        policy = self.policy
        if job.sent_seed is not None and isinstance(policy, HTTPEndpoint):
            sampling = (*policy.sampling, ("seed", job.sent_seed))
            policy = policy.model_copy(update={"sampling": sampling})
        return await stack.run(
            job.row.data,
            policy=policy,
            environment=job.environment,
            limits=self.limits,
            record_bodies=self.record_bodies,
        )


class _Settled:
    """What a run does not run again."""

    def __init__(self, done: Done, given_up: set[Identity]) -> None:
        self.done = done
        self.given_up = given_up

    def __contains__(self, identity: object) -> bool:
        return identity in self.done or identity in self.given_up

    def __bool__(self) -> bool:
        return bool(len(self.done) or self.given_up)


def _refuse_other_split(output: Path, shard: Shard) -> None:
    """A directory holds one whole run, or shards of one split."""
    for found in run_directories(output):
        if (found == output) != (shard.count == 1):
            what = "a run that is not split" if found == output else "shards of a run"
            raise ConfigError(f"{output} holds {what} ({found}); name another -o")
        if found != output and not found.name.endswith(f"-of-{shard.count}"):
            raise ConfigError(
                f"{output} holds {found.name}, this is shard {shard}; split it the same way or name another -o"
            )
