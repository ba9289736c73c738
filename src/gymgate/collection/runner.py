"""Runs jobs, so many at once, each until it has finished or its retries are spent; keeps no result."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymgate.collection.plan import Identity, Job
from gymgate.collection.record import CollectedRollout, collected, failure_line, to_line
from gymgate.collection.retries import DEFAULT_BUDGETS, may_retry, wait_s
from gymgate.collection.store import RunDirectory
from gymgate.collection.tally import Tally
from gymgate.errors import ConfigError, DataError, ErrorKind, GymgateError, from_wire
from gymgate.rollout import Rollout, RolloutError
from gymgate.rollout.result import failed_rollout

STALL_NAMES = 3
LOOK_S = 5.0
"""Between two looks at the policy's replicas."""
STATUS_S = 5.0
"""For the stack to say what it waits for."""
RunOne = Callable[[Job], Awaitable[Rollout]]
"""One attempt; a failed rollout comes back as data."""


@dataclass(frozen=True)
class Pace:
    """How hard a run goes, and when it speaks up or stops."""

    concurrency: int = 64
    budgets: Mapping[ErrorKind, int] = field(default_factory=lambda: DEFAULT_BUDGETS)
    fsync_s: float = 1.0
    """Seconds between two syncs of what was appended; 0: after each rollout."""
    stall_s: float = 120.0
    """Seconds without a finished rollout until a warning."""
    failures_in_a_row: int | None = None
    """Rollouts given up in a row that end the run; `None`: twice the concurrency, 50 at least; 0: never."""

    @property
    def longest_row_of_failures(self) -> int:
        if self.failures_in_a_row is not None:
            return self.failures_in_a_row
        return max(50, 2 * self.concurrency)


class Collector:
    """One run under way."""

    def __init__(
        self,
        jobs: Iterator[Job],
        run_one: RunOne,
        *,
        pace: Pace,
        tally: Tally,
        directory: RunDirectory | None = None,
        on_rollout: Callable[[CollectedRollout], Awaitable[None]] | None = None,
        on_change: Callable[[Tally], None] = lambda tally: None,
        warn: Callable[[str], None] = lambda message: None,
        status: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
        after_failure: Callable[[RolloutError], Awaitable[None]] | None = None,
    ) -> None:
        self.tally = tally
        self.in_flight: dict[Identity, tuple[float, Job]] = {}
        """Since when, as of `time.monotonic`."""
        self._jobs = jobs
        self._run_one = run_one
        self._pace = pace
        self._directory = directory
        self._on_rollout = on_rollout
        self._on_change = on_change
        self._warn = warn
        self._status = status
        self._after_failure = after_failure
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Start nothing more; what runs is finished."""
        self._draining.set()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    async def run(self) -> None:
        """Until every job is settled, or those under way when `drain` was called.

        Raises what ends a run (the disk is full, the stack is lost, everything fails) after cancelling the rest;
        what had finished stays.
        """
        self.tally.start()
        try:
            async with asyncio.TaskGroup() as group:
                watchers = [group.create_task(self._watch_for_stalls())]
                if self._status is not None:
                    watchers.append(group.create_task(self._watch_replicas(self._status)))
                if self._directory is not None and self._pace.fsync_s > 0:
                    watchers.append(group.create_task(self._sync_now_and_then(self._directory)))
                try:
                    await self._work_all()
                finally:
                    for watcher in watchers:
                        watcher.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        if self._directory is not None:
            await asyncio.to_thread(self._directory.sync)

    async def _work_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._pace.concurrency, max(1, self.tally.left))):
                group.create_task(self._work())

    async def _work(self) -> None:
        while not self.draining and (job := next(self._jobs, None)) is not None:
            self.in_flight[job.identity] = time.monotonic(), job
            try:
                await self._settle(job)
            finally:
                del self.in_flight[job.identity]

    async def _settle(self, job: Job) -> None:
        """Attempts, until one finishes or the budget is spent."""
        failures: Counter[str] = Counter()
        if self._directory is not None:
            failures.update(self._directory.attempts.pop(job.identity, Counter()))
        while True:
            rollout = await self._attempt(job)
            if rollout.error is None:
                return await self._finish(job, rollout, failures.total())
            failures[rollout.error.kind] += 1
            again = may_retry(rollout, failures, self._pace.budgets)
            self._fail(job, rollout, failures.total(), final=not again)
            if not again or await self._drained_within(wait_s(failures.total())):
                return None
            if self._after_failure is not None:
                await self._after_failure(rollout.error)

    async def _attempt(self, job: Job) -> Rollout:
        try:
            return await self._run_one(job)
        except (ConfigError, DataError) as error:  # this row cannot be run; the others can
            data = DataError(f"{job.row.source}:{job.row.line}: {error}")
            return failed_rollout(data, environment=job.environment or "", agent=job.row.agent or "")

    async def _finish(self, job: Job, rollout: Rollout, attempt: int) -> None:
        result = collected(job, rollout, attempt)
        if self._directory is not None:
            self._directory.rollouts.append(to_line(result))
            self._directory.done.add(job.identity)
            if not self._pace.fsync_s:
                self._directory.rollouts.sync()
        self.tally.count(rollout)
        self._on_change(self.tally)
        if self._on_rollout is not None:
            await self._on_rollout(result)

    def _fail(self, job: Job, rollout: Rollout, attempt: int, *, final: bool) -> None:
        if self._directory is not None:
            self._directory.failures.append(failure_line(job, rollout, attempt, final=final))
            if final:
                self._directory.given_up.add(job.identity)
        self.tally.count_failure(rollout, final=final)
        self._on_change(self.tally)
        limit = self._pace.longest_row_of_failures
        if limit and self.tally.failed_in_a_row >= limit:
            raise _all_fail(rollout, limit)

    async def _drained_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            return False
        return True

    async def _sync_now_and_then(self, directory: RunDirectory) -> None:
        while True:
            await asyncio.sleep(self._pace.fsync_s)
            await asyncio.to_thread(directory.sync)

    async def _watch_replicas(self, status: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Look at the policy's replicas now and then, if it has some."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                async with asyncio.timeout(STATUS_S):
                    replicas = (await status()).get("replicas")
            except (TimeoutError, GymgateError):
                continue
            if not replicas and self.tally.finished:
                return
            self.tally.look_at_replicas(replicas or {})
            self._on_change(self.tally)

    async def _watch_for_stalls(self) -> None:
        patience = self._pace.stall_s
        while True:
            idle = time.monotonic() - self.tally.last_finished
            if idle < patience:
                patience = self._pace.stall_s if idle < self._pace.stall_s else patience
                await asyncio.sleep(max(0.01, patience - idle))
                continue
            if self.in_flight:
                self._warn(f"{self.describe_stall(idle)}{await self._describe_waits()}")
            patience = 2 * patience

    async def _describe_waits(self) -> str:
        """Whether it is models that are slow, and which; what the stack says within a few seconds."""
        if self._status is None:
            return ""
        try:
            async with asyncio.timeout(STATUS_S):
                return describe_waits(await self._status(), len(self.in_flight))
        except (TimeoutError, GymgateError):
            return "; the stack does not answer"

    def describe_stall(self, idle: float) -> str:
        """What is being waited for, the longest wait first."""
        now = time.monotonic()
        longest = heapq.nsmallest(STALL_NAMES, self.in_flight.values(), key=lambda entry: entry[0])
        named = "; ".join(
            f"{job.environment or job.row.agent} {job} for {now - since:.0f} s" for since, job in longest
        )
        rest = len(self.in_flight) - len(longest)
        return f"nothing finished for {idle:.0f} s; waiting for {named}{f' and {rest} more' if rest else ''}"


def describe_waits(status: Mapping[str, Any], rollouts: int) -> str:
    """What a stack's status says about rollouts that do not end."""
    calls: Mapping[str, int] = status.get("calls") or {}
    parts = [f"{count} calls to {server} have no answer" for server, count in sorted(calls.items())]
    if not parts:
        parts = [f"no model call is under way: {rollouts} rollouts are in their tools, scoring or queues"]
    for url, replica in sorted((status.get("replicas") or {}).items()):
        if not replica["healthy"]:
            parts.append(f"replica {url} is left out")
    return "; " + "; ".join(parts)


def _all_fail(rollout: Rollout, count: int) -> GymgateError:
    assert rollout.error is not None
    message = (
        f"stopped: {count} rollouts failed in a row, the last with {rollout.error.type}: {rollout.error.message}; "
        f"when that is mended, run it again with --rerun-failed"
    )
    return from_wire({"error": rollout.error.type, "message": message})


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
