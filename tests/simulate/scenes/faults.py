"""What happens to the hosts of a scene, and helpers to write one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import simloom

T = TypeVar("T")


def seconds(label: str, longest: float) -> float:
    """Draw a time from 0 to `longest`, in a thousand steps."""
    return longest * simloom.draw(label, 1001) / 1000


def one_of(label: str, choices: Sequence[T]) -> T:
    """Draw one of the choices."""
    return choices[simloom.draw(label, len(choices))]


async def happen(faults: Mapping[str, Callable[[], Any]], *, most: int, over_s: float) -> None:
    """Let up to `most` of the faults happen, at any time, and count each by its name."""
    for _ in range(simloom.draw("how many faults", most + 1)):
        await asyncio.sleep(seconds("time to the next fault", over_s / most))
        name = one_of("which fault", sorted(faults))
        simloom.reached(name)
        faults[name]()


async def ended(tasks: Mapping[asyncio.Task[Any], simloom.Host]) -> None:
    """Return when all tasks have ended, apart from those whose host crashed. Raises the first error of one."""
    while waiting := [task for task, host in tasks.items() if not task.done() and not host.crashed]:
        await asyncio.wait(waiting, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


def split(world: Any, one: simloom.Host, other: simloom.Host, *, for_s: float) -> None:
    """Part two hosts for a time. What they send meanwhile arrives later."""

    async def heal() -> None:
        await asyncio.sleep(for_s)
        world.net.heal()

    world.net.partition([one], [other])
    world.host("repairs").spawn(heal)
