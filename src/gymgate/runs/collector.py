"""Runs planned rollouts, many at once, each until it has finished or its retries are spent. Keeps no result."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from gymgate.core.errors import ConfigError, DataError, GymgateError, from_wire
from gymgate.core.task_groups import beside
from gymgate.rollouts import Rollout, RolloutError
from gymgate.rollouts.result import failed_rollout
from gymgate.runs.pace import Pace, may_retry, wait_s
from gymgate.runs.plan import Identity, PlannedRollout
from gymgate.runs.progress import RunProgress
from gymgate.runs.record import CollectedRollout, collected, failure_line, to_line
from gymgate.runs.store import RunDirectory

STALL_NAMES = 3
"""Rollouts that a warning names."""
REPLICA_SAMPLE_S = 5.0
"""Seconds between two looks at the policy's replicas."""
STATUS_S = 5.0
"""Seconds that the stack has to answer what it waits for."""
RunOne = Callable[[PlannedRollout], Awaitable[Rollout]]
"""Makes one attempt; a failed rollout is a result, not an exception."""
OnRollout = Callable[[CollectedRollout], Awaitable[None]]
OnChange = Callable[[RunProgress], None]
Log = Callable[[str], None]


def ignore(_: object) -> None:
    """Do nothing: the default of callbacks."""


class Collector:
    """One run under way."""

    def __init__(
        self,
        planned: Iterator[PlannedRollout],
        run_one: RunOne,
        *,
        pace: Pace,
        progress: RunProgress,
        directory: RunDirectory | None = None,
        on_rollout: OnRollout | None = None,
        on_change: OnChange = ignore,
        log: Log = ignore,
        status: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
        after_failure: Callable[[RolloutError], Awaitable[None]] | None = None,
        environments: Mapping[str, str] = MappingProxyType({}),
        draining: asyncio.Event | None = None,
    ) -> None:
        """`on_rollout` gets each rollout that finished or failed permanently; `status` is the stack's.

        `environments` names the environment of an agent, for failures of rows that name only their agent. Once `draining`
        is set, nothing more is started.
        """
        self.progress = progress
        self.in_flight: dict[Identity, tuple[float, PlannedRollout]] = {}
        """With the start, as of `time.monotonic`."""
        self._planned = planned
        self._run_one = run_one
        self._pace = pace
        self._directory = directory
        self._on_rollout = on_rollout
        self._on_change = on_change
        self._log = log
        self._status = status
        self._after_failure = after_failure
        self._environments = environments
        self._draining = draining or asyncio.Event()

    def drain(self) -> None:
        """Start nothing more; rollouts under way are finished."""
        self._draining.set()

    async def run(self) -> None:
        """Run every planned rollout, or finish those under way after `drain`.

        Raises what ends a run early (the disk is full, the stack is lost, everything fails) after cancelling the rest;
        what had finished stays.
        """
        self.progress.start()
        watching = [self._warn_of_stalls()]
        if self._status is not None:
            watching.append(self._watch_replicas(self._status))
        if self._directory is not None and self._pace.fsync_s:
            watching.append(self._sync_regularly(self._directory))
        async with beside(watching), asyncio.TaskGroup() as workers:
            for _ in range(min(self._pace.concurrency, max(1, self.progress.left))):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while not self._draining.is_set() and (planned := next(self._planned, None)) is not None:
            self.in_flight[planned.identity] = time.monotonic(), planned
            try:
                await self._settle(planned)
            finally:
                del self.in_flight[planned.identity]

    async def _settle(self, planned: PlannedRollout) -> None:
        """Make attempts until one finishes or the retries are spent."""
        failures: Counter[str] = Counter()
        if self._directory is not None:
            failures.update(self._directory.attempts.get(planned.identity, ()))
        while True:
            rollout = await self._attempt(planned)
            if rollout.error is None:
                return await self._finish(collected(planned, rollout, failures.total()))
            failures[rollout.error.kind] += 1
            again = may_retry(rollout, failures, self._pace.budgets)
            await self._fail(collected(planned, rollout, failures.total()), final=not again)
            if not again or await set_before_end(
                self._draining, self._pause(rollout.error, failures.total())
            ):
                return None

    async def _pause(self, error: RolloutError, failures: int) -> None:
        """Wait before the next attempt, and for what the failed one lacked."""
        await asyncio.sleep(wait_s(failures))
        if self._after_failure is not None:
            await self._after_failure(error)

    async def _attempt(self, planned: PlannedRollout) -> Rollout:
        row = planned.row
        try:
            rollout = await self._run_one(planned)
        except (ConfigError, DataError) as error:  # this row cannot be run; the others can
            located = DataError(f"{row.source}:{row.line}: {error}")
            rollout = failed_rollout(located, environment=planned.environment or "", agent=row.agent or "")
        if rollout.environment:
            return rollout
        return rollout.model_copy(update={"environment": self._environments.get(row.agent or "", "")})

    async def _finish(self, rollout: CollectedRollout) -> None:
        # The disk first: a rollout that the caller was given is never run again.
        if self._directory is not None:
            self._directory.rollouts.append(to_line(rollout))
            self._directory.done.add(rollout.identity)
            self._directory.attempts.pop(rollout.identity, None)
            if not self._pace.fsync_s:
                self._directory.rollouts.sync()
        self.progress.count(rollout)
        self._on_change(self.progress)
        if self._on_rollout is not None:
            await self._on_rollout(rollout)

    async def _fail(self, rollout: CollectedRollout, *, final: bool) -> None:
        assert rollout.error is not None
        if self._directory is not None:
            self._directory.failures.append(failure_line(rollout, final=final))
            self._directory.count_failure(rollout.identity, rollout.error.kind, final=final)
        self.progress.count_failure(rollout, final=final)
        self._on_change(self.progress)
        if final and self._on_rollout is not None:
            await self._on_rollout(rollout)
        limit = self._pace.most_failures_in_a_row
        if limit and self.progress.failed_in_a_row >= limit:
            raise _everything_fails(rollout, limit, kept=self._directory is not None)

    async def _sync_regularly(self, directory: RunDirectory) -> None:
        while True:
            await asyncio.sleep(self._pace.fsync_s)
            await asyncio.to_thread(directory.sync)

    async def _watch_replicas(self, status: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Sample the policy's replicas regularly, if it has several."""
        while True:
            await asyncio.sleep(REPLICA_SAMPLE_S)
            try:
                async with asyncio.timeout(STATUS_S):
                    replicas = (await status()).get("replicas")
            except (TimeoutError, GymgateError):
                continue
            if not replicas and self.progress.finished:
                return
            self.progress.sample_replicas(replicas or {})
            self._on_change(self.progress)

    async def _warn_of_stalls(self) -> None:
        """Log what the run waits for after `stall_s` without a finished rollout, then after twice as long, ..."""
        patience = self._pace.stall_s
        while True:
            idle = time.monotonic() - self.progress.last_finished
            if idle < patience:
                patience = self._pace.stall_s if idle < self._pace.stall_s else patience
                await asyncio.sleep(max(0.01, patience - idle))
                continue
            if self.in_flight:
                self._log(f"{self._describe_stall(idle)}{await self._describe_calls()}")
            patience = 2 * patience

    def _describe_stall(self, idle: float) -> str:
        now = time.monotonic()
        longest = heapq.nsmallest(STALL_NAMES, self.in_flight.values(), key=lambda entry: entry[0])
        named = "; ".join(
            f"{planned.environment or planned.row.agent} {planned} for {now - since:.0f} s"
            for since, planned in longest
        )
        rest = len(self.in_flight) - len(longest)
        return f"nothing finished for {idle:.0f} s; waiting for {named}{f' and {rest} more' if rest else ''}"

    async def _describe_calls(self) -> str:
        if self._status is None:
            return ""
        try:
            async with asyncio.timeout(STATUS_S):
                return describe_calls(await self._status(), len(self.in_flight))
        except (TimeoutError, GymgateError):
            return "; the stack does not answer"


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
