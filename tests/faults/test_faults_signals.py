"""SIGTERM and Ctrl-C at random instants of a program's life: it ends in time, and nothing of its stack stays."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import pytest

from gymgate.stack.paths import remove_of_dead
from support.ledger import Ledger, program

pytestmark = pytest.mark.gym

LIFE = """
async def main():
    async with acquire(stack_config(), progress=say) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        say("up")
        for _ in range(3):
            rollouts = await asyncio.gather(*(stack.run(ROW, policy=policy) for _ in range(4)))
            assert all(rollout.reward == 1.0 for rollout in rollouts)
        say("stopping")

asyncio.run(main())
say("ended")
"""
LIFE_SYNC = """
def policy(body):
    raise SystemError("a failed rollout is data")

with acquire_sync(stack_config(), progress=say) as stack:
    say("up")
    for _ in range(3):
        assert stack.run(ROW, policy=policy).error is not None
    say("stopping")
say("ended")
"""
ENDS_S = 10.0
"""Stopping is bounded by 2.5 s and a grace period; the rest is for a busy machine."""
GONE_S = 15.0
"""For a daemon that was started at that instant to load its modules on a busy machine and see that nobody is left. Half of what
it waits for a first lease, which would be too long here."""


async def life_s(code: str) -> float:
    """How long the program lives when nobody disturbs it."""
    started = time.monotonic()
    async with program(code) as sdk:
        await sdk.until_line("ended", 100)
        assert await sdk.ended(10) == 0
    return time.monotonic() - started


async def disturbed(code: str, after_s: float, signals: list[int]) -> str:
    """Send signals then; how it ended."""
    async with program(code) as sdk:
        deadline = time.monotonic() + after_s
        last = ""
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = await sdk.line(left_s)
            except TimeoutError:
                break
            last = line or last
            if not line:
                break
        for number in signals:
            sdk.signal(number)
        status = await sdk.ended(ENDS_S)
        if last == "ended":
            return last
        assert status != 0 or signal.SIGINT in signals, (last, status)
        return last


CHOICES = ([signal.SIGTERM], [signal.SIGINT], [signal.SIGINT, signal.SIGINT], [signal.SIGINT, signal.SIGTERM])


async def rounds(ledger: Ledger, count: int, seed: int) -> None:
    """So many lives, each ended at an instant of its own.

    A daemon that ends a moment before its program is killed leaves the program's directory, which the next program removes.
    """
    chance, late = random.Random(seed), 0
    longest_s = await life_s(LIFE)
    for number in range(count):
        code = LIFE if number % 2 == 0 else LIFE_SYNC
        after_s, signals = chance.uniform(0, longest_s), chance.choice(CHOICES)
        last = await disturbed(code, after_s, signals)
        left = await asyncio.to_thread(ledger.settle, GONE_S, ("processes", "traces"))
        if last == "stopping" and left.keys() == {"traces"} and late < count // 20:
            late += 1
            remove_of_dead()
            left = ledger.settle(0, ("processes", "traces"))
        print(number, f"{after_s:.2f} s", [signal.Signals(one).name for one in signals], "after", repr(last))
        assert not left, (number, after_s, signals, last, left)


async def test_signals_at_a_few_instants(nothing_left: Ledger) -> None:
    await rounds(nothing_left, 3, seed=4)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
async def test_signals_at_a_hundred_instants(nothing_left: Ledger) -> None:
    await rounds(nothing_left, 100, seed=int(os.environ.get("FAULTS_SEED", "100")))
