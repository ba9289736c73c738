"""Runs a scene in universes, each decided by its seed."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import seams
import simloom
from invariants import LATE_S, Ledger, Violation, nothing_left

QUIET_S = 10.0
"""Virtual seconds after a scene for connections and timers to end by themselves."""


@dataclass(frozen=True)
class Scene:
    """A part of gymgate among scripted others, and the faults that may happen to it.

    `play` gets the simulated world and notes in the ledger what happens. It counts each fault with `simloom.reached` or
    `simloom.sometimes`.
    """

    name: str
    play: Callable[[Any, Ledger], Awaitable[None]]
    faults: tuple[str, ...]
    """Labels, each of which must be counted in the universes of a run together."""
    deadline_s: float
    """Virtual seconds in which each universe ends."""
    seeds: tuple[int, ...] = ()
    """Universes in which a bug was found. They are tried by each run."""
    share: float = 1.0
    """Of the universes that are asked for, less for a scene that takes long."""


@dataclass
class Result:
    """What the universes of a scene came to."""

    universes: int = 0
    seconds: float = 0.0
    """Of CPU time."""
    faults: Counter[str] = field(default_factory=Counter)
    failures: dict[int, BaseException] = field(default_factory=dict)
    """By seed."""


def run_one(scene: Scene, seed: int) -> simloom.RunResult:
    """Run one universe."""

    async def main(world: Any) -> None:
        seams.number_tasks(asyncio.get_running_loop())
        ledger, waiting = Ledger(), list[str]()
        try:
            async with asyncio.timeout(scene.deadline_s + LATE_S) as deadline:
                timer = asyncio.get_running_loop().call_later(
                    scene.deadline_s, lambda: waiting.extend(what_waits())
                )
                await scene.play(world, ledger)
                timer.cancel()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise Violation(f"did not end within {scene.deadline_s:g} s; at its end: {waiting}") from error
        world.net.heal()
        await asyncio.sleep(QUIET_S)
        nothing_left(world)
        ledger.check()

    with seams.entered():
        universe = simloom.run(main, seed=seed, raise_on_error=False, virtual_time=True, seed_randomness=True)
    gc.collect()  # what was left of crashed hosts is closed now, and not in the middle of the next universe
    return universe


def what_waits() -> list[str]:
    """Return the tasks, each with where it waits."""
    found = []
    for task in asyncio.all_tasks():
        awaited: Any = task.get_coro()
        while getattr(awaited, "cr_await", None) is not None and hasattr(awaited.cr_await, "cr_frame"):
            awaited = awaited.cr_await
        if (frame := getattr(awaited, "cr_frame", None)) is not None:
            found.append(f"{task.get_name()} in {awaited.__qualname__}:{frame.f_lineno}")
    return sorted(found)


def run_many(
    scene: Scene, seeds: Iterable[int], *, seconds: float | None = None, most_failures: int = 5
) -> Result:
    """Run universes until the seeds, the seconds or the patience for failures are spent."""
    result, began = Result(), time.process_time()
    for seed in seeds:
        universe = run_one(scene, seed)
        result.universes += 1
        result.faults.update(universe.coverage)
        if universe.error is not None:
            result.failures[seed] = universe.error
        result.seconds = time.process_time() - began
        if len(result.failures) >= most_failures or (seconds is not None and result.seconds >= seconds):
            break
    return result


def quiet() -> None:
    """Keep what gymgate logs of thousands of faults, and what crashed hosts leave, off the screen."""
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore", RuntimeWarning)
