"""A run from beginning to end: plan, directory, stack, rollouts. What `gymgate collect` and the Python API share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymgate.api import open_rows
from gymgate.collection.limits import fitting_concurrency
from gymgate.collection.plan import Done, Identity, Job, Plan, Shard, Source, checked_shard
from gymgate.collection.policy_wait import PolicyWait
from gymgate.collection.ray_stacks import RayStacks, ray_stacks
from gymgate.collection.record import CollectedRollout, read_values
from gymgate.collection.runner import Collector, Pace
from gymgate.collection.settings import extent_of, settings_of
from gymgate.collection.store import ROLLOUTS, RunDirectory, open_run, run_directories
from gymgate.collection.tally import Tally
from gymgate.config import EnvironmentConfig, HTTPEndpoint, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.dataset import Row
from gymgate.dataset import open_rows as open_row_source
from gymgate.dataset.row import make_row
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


async def collect(
    environments: str | Sequence[str | EnvironmentConfig] | StackConfig,
    rows: str | Path | Iterable[Mapping[str, Any]] = "example",
    *,
    policy: Policy,
    output: str | Path | None = None,
    repeats: int = 1,
    seeds: int | Sequence[int] | None = None,
    shard: tuple[int, int] = (1, 1),
    limit: int | None = None,
    limits: RolloutLimits | None = None,
    pace: Pace | None = None,
    concurrency: int | None = None,
    rerun_failed: bool = False,
    record_bodies: bool = False,
    wait_for_policy_s: float | None = None,
    include_finished: bool = True,
    runtime: RuntimeConfig | None = None,
    progress: Say = lambda message: None,
) -> AsyncGenerator[CollectedRollout, None]:
    """Rollouts of rows x seeds x repeats, each as soon as it has finished.

    With `output`, a directory, each is appended to it first; after a kill, the same call runs what is missing, and
    yields what is there already before that (unless not `include_finished`). Failed rollouts are retried within
    `pace.budgets` and then left in `output`'s failures.jsonl. `rows` is a packaged file's name, a path,
    `hf:owner/name[:split]` or dicts; `seeds` a number of them or a list. `wait_for_policy_s` is how long the policy's
    endpoint may take to answer, at the start and after failures of its; 0 asks it once, `None` never. A loop that is
    left early stops the run when the generator is closed:
    `async with contextlib.aclosing(gymgate.collect(...)) as rollouts`.

    Raises `ConfigError` for an output that holds a run with other settings, `DataError` if it cannot be written.
    """
    stack = _stack_config(environments, runtime)
    sources, names = await asyncio.to_thread(_sources, stack, rows, limit)
    pace = pace or Pace()
    if concurrency is not None:
        pace = Pace(**{**pace.__dict__, "concurrency": concurrency})
    plan = await asyncio.to_thread(
        Plan,
        sources,
        repeats=repeats,
        seeds=range(seeds) if isinstance(seeds, int) else seeds,
        shard=checked_shard(*shard),
    )
    run = Collection(
        stack=stack,
        policy=policy,
        plan=plan,
        names=names,
        output=Path(output) if output is not None else None,
        limits=limits or RolloutLimits(),
        pace=pace,
        rerun_failed=rerun_failed,
        record_bodies=record_bodies,
        wait_for_policy_s=wait_for_policy_s,
        say=progress,
    )
    if include_finished and run.directory is not None:
        wanted = Done()
        for identity in plan.identities():
            wanted.add(identity)
        for _, value in read_values(run.directory / ROLLOUTS):
            rollout = CollectedRollout.model_validate(value)
            if rollout.identity in wanted:
                yield rollout
    async with contextlib.aclosing(_as_they_finish(run)) as finished:
        async for rollout in finished:
            yield rollout


async def _as_they_finish(run: Collection) -> AsyncGenerator[CollectedRollout, None]:
    """A slow consumer holds the run up: at most a batch of results waits for it."""
    queue: asyncio.Queue[CollectedRollout | None] = asyncio.Queue(maxsize=run.pace.concurrency)

    async def work() -> None:
        try:
            await run.run(on_rollout=queue.put)
        except asyncio.CancelledError:
            raise
        except BaseException:
            await queue.put(None)
            raise
        await queue.put(None)

    task = asyncio.create_task(work())
    try:
        while (rollout := await queue.get()) is not None:
            yield rollout
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _stack_config(
    environments: str | Sequence[str | EnvironmentConfig] | StackConfig, runtime: RuntimeConfig | None
) -> StackConfig:
    if isinstance(environments, StackConfig):
        return environments
    several = [environments] if isinstance(environments, str) else list(environments)
    configs = tuple(EnvironmentConfig(name=each) if isinstance(each, str) else each for each in several)
    return StackConfig(environments=configs, runtime=runtime or RuntimeConfig())


def _sources(
    stack: StackConfig, rows: str | Path | Iterable[Mapping[str, Any]], limit: int | None
) -> tuple[list[Source], list[str]]:
    names = [environment.name for environment in stack.environments]
    only = names[0] if len(names) == 1 else None
    if not isinstance(rows, str | Path):
        made = [make_row(dict(row), "rows", number) for number, row in enumerate(rows, 1)]
        return [Source(made, only, limit)], ["rows"]
    source = str(rows)
    if isinstance(rows, Path) or source.startswith("hf:") or "/" in source:
        return [Source(open_row_source(source, environment=None), only, limit)], [source]
    opened = [open_rows(name, source, runtime=stack.runtime) for name in names]
    return [Source(_sequence(each), name, limit) for each, name in zip(opened, names, strict=True)], [source]


def _sequence(rows: Iterable[Row]) -> Sequence[Row]:
    return rows if isinstance(rows, Sequence) else list(rows)


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
