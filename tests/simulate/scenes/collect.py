"""A run with real files and a slow consumer, on a stack that is lost, by callers that go away and come back."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import simloom
from invariants import Ledger, Violation
from parts import (
    FAILURES,
    ROLLOUTS,
    CollectedRollout,
    Collection,
    DataError,
    HTTPEndpoint,
    Pace,
    PlannedRollout,
    Rollout,
    RolloutError,
    RolloutPlan,
    RowSource,
    StackConfig,
    StackLostError,
    make_row,
    read_values,
    rollouts_of,
)
from universes import Scene

from scenes.faults import one_of, seconds

ROWS, REPEATS = 8, 2
ALL = ROWS * REPEATS
CONCURRENCY = 4
VISITS = 4
"""Callers one after the other; the last stays to the end."""
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass
class Run(Collection):
    """A run whose stack is scripted, and lost now and then."""

    ledger: Ledger = field(kw_only=True)
    most_losses: int = field(default=3, kw_only=True)
    lost: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    losses: int = field(default=0, init=False)

    @contextlib.asynccontextmanager
    async def _acquire(self) -> AsyncIterator[Any]:
        await asyncio.sleep(seconds("start of the stack", 2.0))
        self.lost = asyncio.Event()
        losing = asyncio.create_task(self._lose(self.lost))
        try:
            yield SimpleNamespace(
                agents={}, status=self._status, description={"settings": {}, "max_rollouts": 1000}
            )
        finally:
            losing.cancel()

    async def _lose(self, lost: asyncio.Event) -> None:
        if self.losses < self.most_losses and simloom.sometimes("stack lost", 60):
            await asyncio.sleep(0.5 + seconds("life of the stack", 6.0))
            self.losses += 1
            lost.set()

    async def _status(self) -> dict[str, Any]:
        return {}

    async def _run_one(self, stack: Any, planned: PlannedRollout) -> Rollout:
        name, lost = name_of(planned.task, planned.identity.repeat), self.lost
        self.ledger.paid[name] += 1
        working = asyncio.create_task(asyncio.sleep(seconds("rollout", 2.0)))
        losing = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait([working, losing], return_when=asyncio.FIRST_COMPLETED)
            if lost.is_set() and not working.done():
                raise StackLostError("the daemon is gone")
        except BaseException:
            self.ledger.reasons[name] += 1
            raise
        finally:
            working.cancel()
            losing.cancel()
        if simloom.sometimes("attempt fails", 15):
            self.ledger.reasons[name] += 1
            self.ledger.excuses[name] += 1
            retryable = not simloom.sometimes("fails for good", 30)
            error = RolloutError(kind="policy", message="no luck", type="PolicyError", retryable=retryable)
            return Rollout(id=name, environment="mcqa", agent="a", status="failed", error=error)
        reward = simloom.draw("reward", 1000) / 1000
        self.ledger.deserved[name] = reward
        return Rollout(id=name, environment="mcqa", agent="a", status="completed", reward=reward)

    def _finish(self, rollout: CollectedRollout) -> None:
        with self._unless_written(rollout):
            super()._finish(rollout)

    def _fail(self, rollout: CollectedRollout, *, final: bool) -> None:
        with self._unless_written(rollout):
            super()._fail(rollout, final=final)

    @contextlib.contextmanager
    def _unless_written(self, rollout: CollectedRollout) -> Iterator[None]:
        """Note that a rollout which could not be written is paid for again."""
        try:
            yield
        except DataError:
            self.ledger.reasons[name_of(rollout.task, rollout.repeat)] += 1
            raise


def name_of(task: int, repeat: int) -> str:
    return f"{task}/{repeat}"


async def play(world: Any, ledger: Ledger) -> None:
    with directory() as output:
        given: dict[str, Any] = {}
        for visit in range(VISITS):
            run, is_last = new_run(output, ledger), visit == VISITS - 1
            goes_after = None if is_last or simloom.draw("stays", 2) else simloom.draw("goes after", ALL)
            with contextlib.suppress(StackLostError):  # twice, and nothing finished in between
                if (told := await take(run, given, goes_after=goes_after)) is not None:
                    account(run, told)
                    return


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Make the directory of a run, in memory, and remove it in the end."""
    output = Path(tempfile.mkdtemp(prefix="gymgate-simulated-", dir=MEMORY))
    try:
        yield output / "run"
    finally:
        shutil.rmtree(output, ignore_errors=True)


def new_run(output: Path, ledger: Ledger, *, most_losses: int = 3) -> Run:
    """Return the run, to begin with or to resume."""
    rows = [
        make_row({"responses_create_params": {"input": str(n)}}, "rows.jsonl", n + 1) for n in range(ROWS)
    ]
    return Run(
        stack=StackConfig(environments=("mcqa",)),
        policy=HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="m"),
        plan=RolloutPlan([RowSource(rows, "mcqa")], repeats=REPEATS),
        output=output,
        pace=Pace(CONCURRENCY, fsync_s=one_of("fsync", [0.0, 1.0])),
        ledger=ledger,
        most_losses=most_losses,
    )


async def take(
    run: Run, given: dict[str, Any], *, goes_after: int | None = None
) -> list[CollectedRollout] | None:
    """Return the rollouts of a run, those of earlier visits included; `None` if the caller goes away before the end.

    `given` has the rewards of those that callers got so far, and gets those of this one.
    """
    told = list[CollectedRollout]()
    async with contextlib.aclosing(rollouts_of(run)) as rollouts:
        async for rollout in rollouts:
            told.append(rollout)
            name = name_of(rollout.task, rollout.repeat)
            if given.setdefault(name, rollout.reward) != rollout.reward:
                raise Violation(f"{name} was given with {given[name]}, and later with {rollout.reward}")
            if len(told) == goes_after:
                simloom.reached("caller goes")
                return None
            if simloom.sometimes("caller is slow", 30):
                await asyncio.sleep(seconds("caller", 8.0))
    if run.in_flight:
        raise Violation(f"{len(run.in_flight)} rollouts are in flight after the run")
    return told


def account(run: Run, told: list[CollectedRollout]) -> None:
    """Note what the whole run came to, by its files and by what its last caller was told."""
    ledger = run.ledger
    assert run.output is not None
    ledger.stored.update(stored_in(run.output))
    ledger.told.update(name_of(rollout.task, rollout.repeat) for rollout in told)
    for rollout in told:
        name = name_of(rollout.task, rollout.repeat)
        ledger.ended(name, rollout.reward, failed=None if rollout.error is None else rollout.error.type)
    ledger.asked |= {name_of(task, repeat) for task in range(ROWS) for repeat in range(REPEATS)}


def stored_in(output: Path) -> list[str]:
    """Return the rollouts that the run's files end with, those that failed permanently included."""
    lines = [value for _, value in read_values(output / ROLLOUTS)]
    if (output / FAILURES).exists():
        lines += [value for _, value in read_values(output / FAILURES) if value["final"]]
    return [name_of(line["task"], line["repeat"]) for line in lines]


SCENE = Scene(
    "collect",
    play,
    ("stack lost", "attempt fails", "fails for good", "caller goes", "caller is slow"),
    deadline_s=600,
    seeds=(2,),  # a lost stack cancelled workers between their write and the caller: 16 stored, 13 told
)
