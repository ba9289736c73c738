"""A run from beginning to end: plan, directory, stack, rollouts. `gymgate run` and `gymgate.collect` use it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymgate.core.config import HTTPEndpoint, ReplayEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.rollouts import Rollout
from gymgate.runs.collector import Collector, Log, OnChange, OnRollout, ignore, set_before_end
from gymgate.runs.pace import Pace, fitting_concurrency
from gymgate.runs.plan import Identity, IdentitySet, PlannedRollout, RolloutPlan, Shard
from gymgate.runs.policy_wait import PolicyWait
from gymgate.runs.progress import RunProgress
from gymgate.runs.record import CollectedRollout
from gymgate.runs.settings import extent_of, settings_of
from gymgate.runs.store import RunDirectory, open_run, run_directories
from gymgate.runs.tracing import Tracer, models_of
from gymgate.stack import Policy, Stack, acquire


@dataclass
class Collection:
    """A run that is described and not started yet."""

    stack: StackConfig
    policy: Policy
    plan: RolloutPlan
    names: Sequence[str] = ()
    """The sources, as the run's settings show them."""
    output: Path | None = None
    """The run's directory; `None`: nothing is written."""
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    pace: Pace = field(default_factory=Pace)
    rerun_failed: bool = False
    record_bodies: bool = False
    wait_for_policy_s: float | None = None
    """Seconds that the policy's endpoint has to answer, at the start and after its failures; 0: ask once; `None`: never."""
    tracer: Tracer | None = None
    """Exports each rollout as it finishes or fails permanently."""
    log: Log = ignore
    progress: RunProgress = field(default_factory=RunProgress)
    stack_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the stack, as far as they are known before it reports its own."""
    collector: Collector | None = None
    """While it runs."""
    _draining: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if isinstance(self.policy, HTTPEndpoint) and "seed" in dict(self.policy.sampling):
            raise ConfigError(
                "one seed in sampling would make every rollout of a row the same; use seeds (--seeds)"
            )

    @property
    def draining(self) -> bool:
        """Whether nothing more is started."""
        return self._draining.is_set()

    @property
    def directory(self) -> Path | None:
        """The directory of this shard."""
        shard = self.plan.shard
        return self.output / shard.directory if self.output and shard.count > 1 else self.output

    @property
    def replayed(self) -> bool:
        """Whether recorded rollouts answer for the policy."""
        return isinstance(self.policy, ReplayEndpoint)

    async def run(
        self,
        *,
        on_rollout: OnRollout | None = None,
        on_change: OnChange = ignore,
        on_ready: OnChange = ignore,
        on_open: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run what is left of the run. Raises what keeps it from starting or ends it early.

        `on_rollout` gets each rollout that finished or failed permanently, after it was written. `on_open` is called when the
        directory is this process's and its settings are the same, before anything starts; `on_ready` when the stack is up.
        """
        for error in self.plan.invalid:
            self.log(f"left out: {error}")
        async with contextlib.AsyncExitStack() as exits:
            directory = self._open(exits)
            finished_before = _Finished(directory, self.rerun_failed)
            self._count(finished_before)
            if on_open is not None:
                await on_open()
            if not self.progress.left:
                on_ready(self.progress)
                return
            policy_wait = PolicyWait(self.policy, self.wait_for_policy_s, self.log)
            exits.callback(policy_wait.close)
            if not await set_before_end(self._draining, policy_wait.at_start()):
                await self._run_until_done(
                    directory, finished_before, policy_wait, on_rollout, on_change, on_ready
                )

    async def _run_until_done(
        self,
        directory: RunDirectory | None,
        finished_before: _Finished,
        policy_wait: PolicyWait,
        on_rollout: OnRollout | None,
        on_change: OnChange,
        on_ready: OnChange,
    ) -> None:
        """A lost stack is started again, as long as rollouts finish in between."""
        finished = -1
        while True:
            try:
                async with acquire(self.stack, progress=self.log) as stack:
                    self.stack_settings = stack.described["settings"]
                    if directory is not None:
                        directory.add_settings(self.settings())
                    self.collector = Collector(
                        self.plan.rollouts(finished_before),
                        functools.partial(self._run_one, stack),
                        pace=self._fitting_pace(),
                        progress=self.progress,
                        directory=directory,
                        on_rollout=self._traced(on_rollout),
                        on_change=on_change,
                        log=self.log,
                        status=stack.status,
                        after_failure=policy_wait.after,
                        environments={name: agent.environment for name, agent in stack.agents.items()},
                        draining=self._draining,
                    )
                    on_ready(self.progress)
                    return await self.collector.run()
            except StackLostError as error:
                if directory is None or self.draining or self.progress.finished <= finished:
                    raise
                finished = self.progress.finished
                self.log(f"{error}; starting it again")

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resume must share, as JSON values."""
        return {**settings_of(self.policy, self.limits, self.names), **self.stack_settings}

    def drain(self) -> None:
        """Start nothing more; `run` returns when the rollouts under way have finished."""
        self._draining.set()

    def _traced(self, on_rollout: OnRollout | None) -> OnRollout | None:
        """Return `on_rollout`, which the tracer comes before if there is one."""
        if (tracer := self.tracer) is None:
            return on_rollout
        models = models_of(self.policy, dict(self.stack.models))

        async def record(rollout: CollectedRollout) -> None:
            tracer.record(rollout, models=models)
            if on_rollout is not None:
                await on_rollout(rollout)

        return record

    def _open(self, exits: contextlib.AsyncExitStack) -> RunDirectory | None:
        if self.directory is None or self.output is None:
            return None
        _refuse_other_split(self.output, self.plan.shard)
        directory = exits.enter_context(
            open_run(self.directory, self.settings(), extent_of(self.plan), self.plan.row_keys())
        )
        if directory.repaired:
            self.log(
                f"{self.directory}: cut off {directory.repaired} bytes of a line that a killed run did not finish"
            )
        return directory

    def _count(self, finished_before: _Finished) -> None:
        progress = self.progress
        progress.total = self.plan.total()
        if not finished_before:
            return
        progress.resumed = sum(identity in finished_before for identity in self.plan.identities())
        given_up = sum(identity in finished_before.given_up for identity in self.plan.identities())
        progress.given_up_before = given_up
        there = f"{progress.resumed - given_up} of {progress.total} rollouts are there already"
        failed = f", {given_up} failed permanently (--rerun-failed retries them)" if given_up else ""
        self.log(f"resuming {self.directory}: {there}{failed}")

    def _fitting_pace(self) -> Pace:
        fitting, message = fitting_concurrency(self.pace.concurrency)
        if message is not None:
            self.log(message)
        return self.pace.model_copy(update={"concurrency": fitting})

    async def _run_one(self, stack: Stack, planned: PlannedRollout) -> Rollout:
        policy = self.policy
        if planned.sent_seed is not None and isinstance(policy, HTTPEndpoint):
            sampling = (*policy.sampling, ("seed", planned.sent_seed))
            policy = policy.model_copy(update={"sampling": sampling})
        return await stack.run(
            planned.row.data,
            policy=policy,
            environment=planned.environment,
            limits=self.limits,
            record_bodies=self.record_bodies,
        )


class _Finished:
    """Rollouts to skip: those that finished or failed permanently before."""

    def __init__(self, directory: RunDirectory | None, rerun_failed: bool) -> None:
        self.done = IdentitySet() if directory is None else directory.done
        self.given_up: set[Identity] = set() if directory is None else directory.given_up
        if rerun_failed and directory is not None:
            directory.attempts.clear()
            directory.given_up.clear()

    def __contains__(self, identity: object) -> bool:
        return identity in self.done or identity in self.given_up

    def __bool__(self) -> bool:
        return bool(len(self.done) or self.given_up)


def _refuse_other_split(output: Path, shard: Shard) -> None:
    """A directory holds one whole run, or shards of one split."""
    for found in run_directories(output):
        if (found == output) != (shard.count == 1):
            what = "a run that is not split" if found == output else "shards of a run"
            raise ConfigError(f"{output} holds {what} ({found}); choose another -o")
        if found != output and not found.name.endswith(f"-of-{shard.count}"):
            raise ConfigError(
                f"{output} holds {found.name}, this is shard {shard}; split it the same way or choose another -o"
            )
