"""A run from beginning to end: plan, directory, stack, rollouts. `gymgate run` and `gymgate.collect` use it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.config import HTTPEndpoint, ReplayEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, DataError, GymgateError, StackLostError, from_wire
from gymgate.core.task_groups import beside
from gymgate.rollouts import Rollout, RolloutError
from gymgate.rollouts.result import failed_rollout
from gymgate.runs.collected.policy_wait import PolicyWait
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.collected.store import RunDirectory, checked_output, open_run
from gymgate.runs.collected.tracing import Tracer, models_of
from gymgate.runs.described.pace import Pace, fitting_concurrency, may_retry, wait_s
from gymgate.runs.described.plan import Identity, PlannedRollout, RolloutPlan, Shard
from gymgate.runs.described.settings import differences, extent_of, settings_of
from gymgate.runs.stored.layout import read_run, run_directories
from gymgate.runs.stored.record import CollectedRollout, collected
from gymgate.stack import Policy, Stack, acquire
from gymgate.stack.description import endpoint_settings

STALL_NAMES = 3
"""Rollouts that a warning names."""
REPLICA_SAMPLE_S = 5.0
"""Seconds between two looks at the policy's replicas."""
STATUS_S = 5.0
"""Seconds that the stack has to answer what it waits for."""
OnRollout = Callable[[CollectedRollout], None]
OnChange = Callable[[RunProgress], None]
Log = Callable[[str], None]


def ignore(_: object) -> None:
    """Do nothing: the default of callbacks."""


async def wait_for_nothing() -> None:
    """Return at once: the default of `before_rollout`."""


@dataclass
class Collection:
    """A run: what it is, and how far it is. Keeps no result."""

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
    in_flight: dict[Identity, tuple[float, PlannedRollout]] = field(default_factory=dict)
    """With the start, as of `time.monotonic`."""
    stack_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the stack, as far as they are known before it reports its own."""
    _salt: str = field(init=False)
    """Of the digests in its settings; a resumed run keeps its own, and a shard takes that of another one."""
    _function: Any = field(default=None, init=False)
    """Settings of a policy that is a function, as it is now: neither its file nor its object is the run's to watch."""
    _run_directory: RunDirectory | None = field(default=None, init=False)
    """The directory while it is open."""
    _on_rollout: OnRollout = field(default=ignore, init=False)
    _before_rollout: Callable[[], Awaitable[object]] = field(default=wait_for_nothing, init=False)
    _on_change: OnChange = field(default=ignore, init=False)
    _draining: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        if self.output is not None:
            checked_output(self.output)
        if callable(self.policy):
            self._function = endpoint_settings(self.policy)
        self._salt = secrets.token_hex(8)
        if self.output is not None and self.directory is not None:
            for directory in (*run_directories(self.output), self.directory):
                with contextlib.suppress(DataError):  # no run is there, or one that `run` refuses
                    self._salt = str(read_run(directory)["settings"].get("salt") or self._salt)
        if isinstance(self.policy, HTTPEndpoint) and "seed" in dict(self.policy.sampling):
            raise ConfigError(
                "one seed in sampling would make every rollout of a row the same; use seeds (--seeds)"
            )
        # In a rescoring (`only`), seeds say which rollout of a row it is; none is sent again.
        if (
            self.plan.seeds is not None
            and self.plan.only is None
            and not isinstance(self.policy, HTTPEndpoint)
        ):
            kind = "recorded rollouts" if self.replayed else "a function"
            raise ConfigError(f"seeds are sent to an endpoint, and {kind} cannot use them; use repeats")

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

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resume must share, as JSON values."""
        own = settings_of(self.policy, self.limits, self.names, self.stack.env_vars, self._salt)
        if self._function is not None:
            own["policy"] = self._function
        return {**own, **self.stack_settings}

    def drain(self) -> None:
        """Start nothing more; `run` returns when the rollouts under way have finished."""
        self._draining.set()

    async def run(
        self,
        *,
        on_rollout: OnRollout = ignore,
        before_rollout: Callable[[], Awaitable[object]] = wait_for_nothing,
        on_change: OnChange = ignore,
        on_ready: OnChange = ignore,
        on_open: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run what is left of the run, or finish what is under way after `drain`.

        Raises what keeps it from starting or ends it early (the disk is full, the stack is lost, everything fails), after
        cancelling the rest; what had finished stays. `on_rollout` gets each rollout that finished or failed permanently,
        as soon as it was written. `before_rollout` is awaited before each rollout starts: there a slow caller holds the run
        up. `on_open` is called when the directory is this process's and its settings are the same, before anything starts;
        `on_ready` when the stack is up.
        """
        self._on_rollout, self._before_rollout, self._on_change = on_rollout, before_rollout, on_change
        for error in self.plan.invalid:
            self.log(f"left out: {error}")
        for warning in self.plan.warnings:
            self.log(f"warning: {warning}")
        async with contextlib.AsyncExitStack() as exits:
            done = self._open(exits)
            if on_open is not None:
                await on_open()
            if not self.progress.left:
                on_ready(self.progress)
                return
            policy_wait = PolicyWait(self.policy, self.wait_for_policy_s, self.log)
            exits.callback(policy_wait.close)
            if not await set_before_end(self._draining, policy_wait.at_start()):
                await self._run_until_done(done, policy_wait, on_ready)

    def _open(self, exits: contextlib.AsyncExitStack) -> Container[Identity]:
        """Open the directory, and return the rollouts to skip: those that finished or failed permanently before."""
        progress, total = self.progress, self.plan.total()
        if self.directory is None or self.output is None:
            progress.total = total
            return ()
        # Before anything is made: a directory that this command may not write to is left as it is.
        _refuse_other_split(self.output, self.plan.shard)
        _refuse_other_shards(self.output, self.directory, self.settings())
        # From here on no other process writes to it, so what it holds is read once, now, and added to as rollouts end.
        directory = exits.enter_context(
            open_run(self.directory, self.settings(), extent_of(self.plan), self.plan.row_keys())
        )
        self._refuse_moved_copies(directory)
        directory.tasks.count_failed_as(progress.tasks.failed_as)
        # Its tasks become the progress's, so that the table at the end has earlier processes' rollouts, too.
        self._run_directory, progress.tasks, progress.total = directory, directory.tasks, total
        if directory.repaired:
            self.log(
                f"{self.directory}: cut off {directory.repaired} bytes of a line that a killed run did not finish"
            )
        # Before it is counted what is there already: rollouts that are retried are still to do.
        if self.rerun_failed:
            directory.retry_failed()
        if len(directory.done) or directory.given_up:
            progress.resumed = sum(identity in directory for identity in self.plan.identities())
            given_up = sum(identity in directory.given_up for identity in self.plan.identities())
            progress.given_up_before = given_up
            there = f"{progress.resumed - given_up} of {progress.total} rollouts are there already"
            failed = f", {given_up} failed permanently (--rerun-failed retries them)" if given_up else ""
            self.log(f"resuming {self.directory}: {there}{failed}")
        return directory

    def _refuse_moved_copies(self, directory: RunDirectory) -> None:
        """Raise `ConfigError` if a stored row is one of another environment now.

        Occurrences count the equal rows of all environments in their order, so more rows of one move those of the next.
        """
        environments = self.plan.environments_of_copies()
        for task in directory.tasks.tasks.values():
            now = environments.get((task.row_key, task.occurrence)) or task.environment
            if task.environment and now != task.environment:
                raise ConfigError(
                    f"{directory.path} has rollouts of {task.name}, which equals a row of {now!r} that is chosen now, and they "
                    "would count for that one; choose another -o, or run each environment by itself"
                )

    def _acquire(self) -> AbstractAsyncContextManager[Stack]:
        return acquire(self.stack, progress=self.log)

    async def _run_until_done(
        self, done: Container[Identity], policy_wait: PolicyWait, on_ready: OnChange
    ) -> None:
        """A lost stack is started again, as long as rollouts finish in between."""
        finished = -1
        while True:
            try:
                async with self._acquire() as stack:
                    self.stack_settings = stack.description["settings"]
                    if self._run_directory is not None:
                        self._run_directory.add_settings(self.settings())
                    on_ready(self.progress)
                    return await self._collect(stack, self.plan.rollouts(done), policy_wait)
            except StackLostError as error:
                if self._run_directory is None or self.draining or self.progress.finished <= finished:
                    raise
                finished = self.progress.finished
                self.log(f"{error}; starting it again")

    async def _collect(
        self, stack: Stack, planned: Iterator[PlannedRollout], policy_wait: PolicyWait
    ) -> None:
        """Run planned rollouts on a stack, many at once."""
        self.progress.start()
        concurrency, message = fitting_concurrency(self.pace.concurrency, stack.description["max_rollouts"])
        if message is not None:
            self.log(message)
        watching = [self._warn_of_stalls(stack), self._watch_replicas(stack)]
        if self._run_directory is not None and self.pace.fsync_s:
            watching.append(self._sync_regularly(self._run_directory))
        async with beside(watching), asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, max(1, self.progress.left))):
                workers.create_task(self._work(stack, planned, policy_wait))

    async def _work(self, stack: Stack, planned: Iterator[PlannedRollout], policy_wait: PolicyWait) -> None:
        while True:
            await self._before_rollout()
            if self.draining or (next_one := next(planned, None)) is None:
                return
            self.in_flight[next_one.identity] = time.monotonic(), next_one
            try:
                await self._settle(stack, next_one, policy_wait)
            finally:
                del self.in_flight[next_one.identity]

    async def _settle(self, stack: Stack, planned: PlannedRollout, policy_wait: PolicyWait) -> None:
        """Make attempts until one finishes or the retries are spent."""
        failures: Counter[str] = Counter()
        if self._run_directory is not None:
            failures.update(self._run_directory.attempts.get(planned.identity, ()))
        while True:
            rollout = await self._attempt(stack, planned)
            if rollout.error is None:
                return self._finish(collected(planned, rollout, failures.total()))
            failures[rollout.error.kind] += 1
            again = may_retry(rollout, failures, self.pace.budgets)
            self._fail(collected(planned, rollout, failures.total()), final=not again)
            if not again or await set_before_end(
                self._draining, _pause(rollout.error, failures.total(), policy_wait)
            ):
                return None

    async def _attempt(self, stack: Stack, planned: PlannedRollout) -> Rollout:
        row = planned.row
        try:
            rollout = await self._run_one(stack, planned)
        except (ConfigError, DataError) as error:  # this row cannot be run; the others can
            located = DataError(f"{row.source}:{row.line}: {error}")
            rollout = failed_rollout(located, environment=planned.environment or "", agent=row.agent or "")
        if not rollout.environment and (agent := stack.agents.get(row.agent or "")) is not None:
            return rollout.model_copy(update={"environment": agent.environment})
        return rollout

    async def _run_one(self, stack: Stack, planned: PlannedRollout) -> Rollout:
        """Make one attempt; a failed rollout is a result, not an exception."""
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

    # No await from the write to the caller: a lost stack would cancel it there, and the rollout, which is not run again,
    # would never be told. The disk first: a rollout that the caller was given is never run again.

    def _finish(self, rollout: CollectedRollout) -> None:
        if self._run_directory is not None:
            self._run_directory.add(rollout)
            if not self.pace.fsync_s:
                self._run_directory.rollouts.sync()
        self.progress.count(rollout)
        self._tell(rollout)

    def _fail(self, rollout: CollectedRollout, *, final: bool) -> None:
        if self._run_directory is not None:
            self._run_directory.add_failure(rollout, final=final)
        self.progress.count_failure(rollout, final=final)
        if final:
            self._tell(rollout)
        else:
            self._on_change(self.progress)
        limit = self.pace.most_failures_in_a_row
        if limit and self.progress.failed_in_a_row >= limit:
            raise _everything_fails(rollout, limit, kept=self._run_directory is not None)

    def _tell(self, rollout: CollectedRollout) -> None:
        """Tell of a rollout that finished or failed permanently."""
        self._on_change(self.progress)
        if self.tracer is not None:
            self.tracer.record(rollout, models=models_of(self.policy, dict(self.stack.models)))
        self._on_rollout(rollout)

    async def _sync_regularly(self, directory: RunDirectory) -> None:
        while True:
            await asyncio.sleep(self.pace.fsync_s)
            await asyncio.to_thread(directory.sync)

    async def _watch_replicas(self, stack: Stack) -> None:
        """Sample the policy's replicas regularly, if it has several."""
        while True:
            await asyncio.sleep(REPLICA_SAMPLE_S)
            try:
                async with asyncio.timeout(STATUS_S):
                    replicas = (await stack.status()).get("replicas")
            except (TimeoutError, GymgateError):
                continue
            if not replicas and self.progress.finished:
                return
            self.progress.sample_replicas(replicas or {})
            self._on_change(self.progress)

    async def _warn_of_stalls(self, stack: Stack) -> None:
        """Log what the run waits for after `stall_s` without a finished rollout, then after twice as long, ..."""
        patience = self.pace.stall_s
        while True:
            idle = time.monotonic() - self.progress.last_finished
            if idle < patience:
                patience = self.pace.stall_s if idle < self.pace.stall_s else patience
                await asyncio.sleep(max(0.01, patience - idle))
                continue
            if self.in_flight:
                self.log(f"{self._describe_stall(idle)}{await self._describe_calls(stack)}")
            patience = 2 * patience

    def _describe_stall(self, idle: float) -> str:
        now = time.monotonic()
        longest = heapq.nsmallest(STALL_NAMES, self.in_flight.values(), key=lambda entry: entry[0])
        names = "; ".join(
            f"{planned.environment or planned.row.agent} {planned} for {now - since:.0f} s"
            for since, planned in longest
        )
        rest = len(self.in_flight) - len(longest)
        others = f" and {rest} more" if rest else ""
        ends = f"each is ended after {self.limits.timeout_s:g} s (--timeout)"
        return f"nothing finished for {idle:.0f} s; waiting for {names}{others}; {ends}"

    async def _describe_calls(self, stack: Stack) -> str:
        try:
            async with asyncio.timeout(STATUS_S):
                return describe_calls(await stack.status(), len(self.in_flight))
        except (TimeoutError, GymgateError):
            return "; the stack does not answer"


async def _pause(error: RolloutError, failures: int, policy_wait: PolicyWait) -> None:
    """Wait before the next attempt, and for what the failed one lacked."""
    await asyncio.sleep(wait_s(failures))
    await policy_wait.after(error)


async def set_before_end(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or cancel it as soon as `event` is set; whether it was. Raises what `work` raises."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work), asyncio.create_task(event.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return event.is_set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def describe_calls(status: Mapping[str, Any], rollouts: int) -> str:
    """Which models the rollouts wait for, and which replicas are left out, from a stack's status."""
    calls: Mapping[str, int] = status.get("calls") or {}
    parts = [f"{count} calls to {server} have no answer" for server, count in sorted(calls.items())]
    if not parts:
        parts = [f"no model call is under way: {rollouts} rollouts are in their tools, scoring or queues"]
    for url, replica in sorted((status.get("replicas") or {}).items()):
        if not replica["healthy"]:
            parts.append(f"replica {url} is left out")
    return "; " + "; ".join(parts)


def _everything_fails(rollout: Rollout, count: int, *, kept: bool) -> GymgateError:
    assert rollout.error is not None
    again = " with --rerun-failed" if kept else ""
    message = (
        f"stopped: {count} rollouts failed in a row, the last with {rollout.error.type}: {rollout.error.message}; "
        f"fix the cause and run it again{again}"
    )
    return from_wire({"error": rollout.error.type, "message": message})


def _refuse_other_split(output: Path, shard: Shard) -> None:
    """A directory holds one whole run, or shards of one split; as it may be somebody else's, none of them is a link."""
    if shard.count > 1 and (own := output / shard.directory).is_symlink():
        raise ConfigError(f"{own} is a link, which may lead anywhere; put a directory there")
    for run in run_directories(output):
        if (run == output) != (shard.count == 1):
            what = "a run that is not split" if run == output else "shards of a run"
            raise ConfigError(f"{output} holds {what} ({run}); choose another -o")
        if run != output and not run.name.endswith(f"-of-{shard.count}"):
            raise ConfigError(
                f"{output} holds {run.name}, this is shard {shard}; split it the same way or choose another -o"
            )


def _refuse_other_shards(output: Path, own: Path, settings: Mapping[str, Any]) -> None:
    """Shards are read as one run, so all have the settings that a resume must have."""
    now = codec.loads(codec.dumps(settings))
    for shard in run_directories(output):
        if shard != own and (changed := differences(read_run(shard)["settings"], now)):
            raise ConfigError(f"{shard} has other settings ({'; '.join(changed)}); choose another -o")
