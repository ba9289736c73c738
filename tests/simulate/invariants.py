"""What must hold in each universe, whatever happened in it.

A scene notes in its `Ledger` what really happened, as its scripted policies, verifiers and files saw it, and what its callers
were told. `check` compares the two at the universe's end, after `nothing_left`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LATE_S = 1.0
"""Virtual seconds after its deadline at which everything has ended."""
ROUNDING_S = 0.001


class Violation(AssertionError):
    """A promise that does not hold in this universe."""


class End(NamedTuple):
    """How a rollout or a call ended for its caller."""

    value: Any = None
    """Its reward or answer."""
    failed: str | None = None
    """The class of the error."""


@dataclass
class Ledger:
    """The truth about one universe, and what its callers were told. Rollouts and calls have any names."""

    deserved: dict[Hashable, Any] = field(default_factory=dict)
    """The reward, or answer, that its own conversation deserves, by the log of the policy or verifier."""
    asked: set[Hashable] = field(default_factory=set)
    """Rollouts or calls whose caller waited to the end of the universe."""
    ends: defaultdict[Hashable, list[End]] = field(default_factory=lambda: defaultdict(list))
    excuses: Counter[Hashable] = field(default_factory=Counter)
    """Faults that may have made it fail."""
    paid: Counter[Hashable] = field(default_factory=Counter)
    """How often it was worked on."""
    reasons: Counter[Hashable] = field(default_factory=Counter)
    """Why it may have been worked on again."""
    recorded: Counter[Hashable] = field(default_factory=Counter)
    """How often it was worked on by the record that the caller gets, for scenes that have one."""
    wrong: list[str] = field(default_factory=list)
    """What a scripted part saw and could not raise, e.g. a call that reached another endpoint than its own."""
    stored: Counter[Hashable] = field(default_factory=Counter)
    told: Counter[Hashable] = field(default_factory=Counter)
    left: dict[str, Callable[[], int]] = field(default_factory=dict)
    """Counts what is still there at the end, by its name, e.g. routes."""

    def ended(self, name: Hashable, value: Any = None, *, failed: str | None = None) -> None:
        self.ends[name].append(End(value, failed))

    def reached(self, own: str, endpoint: str) -> None:
        """Note that a call of `own` reached an endpoint."""
        if own != endpoint:
            self.wrong.append(f"a call for {own} reached {endpoint}")

    def check(self) -> None:
        """Raise `Violation` for the first promise that does not hold."""
        if self.stored != self.told:
            raise Violation(
                f"{self.stored.total()} stored, {self.told.total()} told; "
                f"stored only: {list(self.stored - self.told)}, told only: {list(self.told - self.stored)}"
            )
        for name in sorted(self.asked, key=str):
            ends = self.ends.get(name, [])
            if len(ends) != 1:
                raise Violation(f"{name} ended {len(ends)} times: {ends}")
        for name, ends in self.ends.items():
            for end in ends:
                if end.failed is None and end.value != self.deserved.get(name):
                    raise Violation(f"{name} got {end.value!r} and deserves {self.deserved.get(name)!r}")
                if end.failed is not None and not self.excuses[name]:
                    raise Violation(f"{name} failed with {end.failed} although nothing happened to it")
        if self.wrong:
            raise Violation("; ".join(self.wrong))
        for name, times in self.paid.items():
            if times > 1 + self.reasons[name]:
                raise Violation(
                    f"{name} was paid {times} times, with {self.reasons[name]} reasons to pay again"
                )
            if self.recorded and times > self.recorded[name]:
                raise Violation(f"{name} was paid {times} times, by its record {self.recorded[name]} times")
        if left := {what: count for what, counted in self.left.items() if (count := counted())}:
            raise Violation(f"left: {left}")


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise `Violation` if the block takes more virtual time than its deadline and a second."""
    began = asyncio.get_running_loop().time()
    yield
    took = asyncio.get_running_loop().time() - began
    if took > seconds + LATE_S + ROUNDING_S:
        raise Violation(f"{what} took {took:.2f} s; its deadline is {seconds:g} s")


def nothing_left(world: Any) -> None:
    """Raise `Violation` for tasks, timers and connections that are left, apart from those of hosts that crashed."""
    loop: Any = asyncio.get_running_loop()
    tasks = [
        f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '')})"
        for task in asyncio.all_tasks()
        if task is not asyncio.current_task() and id(task) not in loop._crashed_ids
    ]
    timers = [
        str(handle._callback)
        for _, _, handle in loop._scheduled
        if not handle.cancelled() and not loop._is_crashed_context(handle)
    ]
    connections = [
        transport.get_extra_info("peername")
        for transport in world.net._live_transports.values()
        if not (transport.owner is not None and transport.owner.crashed)
    ]
    for kind, left in (("tasks", tasks), ("timers", timers), ("connections", connections)):
        if left:
            raise Violation(f"{len(left)} {kind} left: {left[:3]}")
