"""kill -9 of any process of a stack while it starts and while it stops. While it runs: tests/integration/test_stack_deaths.py."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from gymgate.core.errors import GymgateError, StackLostError, StackStartError
from gymgate.stack import Stack, acquire, connect
from support.ledger import all_gone, children, daemon_of, fork_server_of, program, until
from support.stacks import SIMPLE, pids_of, server_pid, stack_config

pytestmark = pytest.mark.gym

AGENT = f"{SIMPLE}_simple_agent"


def own_daemon() -> int | None:
    return daemon_of(os.getpid())


def own_fork_server() -> int | None:
    daemon = own_daemon()
    return fork_server_of(daemon) if daemon else None


def newest_server() -> int | None:
    fork_server = own_fork_server()
    return next(reversed(children(fork_server)), None) if fork_server else None


STARTING = {
    "daemon, importing": ("importing", own_daemon, StackLostError),
    "daemon, starting servers": ("starting", own_daemon, StackLostError),
    "fork server, importing": ("importing", own_fork_server, StackStartError),
    "fork server, parsing": ("reading", newest_server, StackStartError),
    "fork server, starting servers": ("starting", own_fork_server, StackStartError),
    "a server, starting": ("starting", newest_server, StackStartError),
}


OFTEN = ("daemon, importing", "daemon, starting servers", "fork server, importing", "a server, starting")


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.heavy) for case in STARTING]
)
async def test_a_death_while_starting_is_told(case: str) -> None:
    """To everyone who waits, within seconds; the next start is not disturbed by it."""
    word, victim, expected = STARTING[case]
    said: list[str] = []
    waiting = [asyncio.create_task(connect(stack_config(), progress=said.append)) for _ in range(2)]
    await until(lambda: any(word in line for line in [*said, ""]), what=word)
    await until(victim, what=case)
    await killed(victim)
    started = time.monotonic()
    errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 8)
    for stack in errors:
        if isinstance(stack, Stack):
            await stack.close()
    assert time.monotonic() - started < 5
    assert [type(error) for error in errors] == [expected] * 2, errors
    for error in errors:
        assert isinstance(error, GymgateError)
        assert "\n" not in error.message


async def test_a_daemon_that_dies_before_it_answers_is_replaced() -> None:
    """Nobody has heard of it: its death is no reason to fail. The next one dies while it stops, and leaves nothing."""
    waiting = asyncio.create_task(connect(stack_config()))
    await until(own_daemon)
    await killed(own_daemon)
    stack = await waiting
    assert (await stack.status())["leases"] == 1
    await dies_while_stopping(stack, "daemon")


async def killed(victim: Callable[[], int | None]) -> None:
    pid = victim()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "who",
    ["fork server", *(pytest.param(name, marks=pytest.mark.heavy) for name in (SIMPLE, AGENT))],
)
async def test_a_death_while_stopping_leaves_nothing(who: str) -> None:
    async with acquire(stack_config()) as stack:
        await dies_while_stopping(stack, who)


async def dies_while_stopping(stack: Stack, who: str) -> None:
    status = await stack.status()
    pids = {"daemon": status["pid"], "fork server": status["fork_servers"][0]}
    pids |= {name: server_pid(status, SIMPLE, name) for name in (SIMPLE, AGENT)}
    assert len(pids_of(status)) == 4
    closing = asyncio.create_task(stack.close())
    await asyncio.sleep(0.05)  # into the servers' period of grace
    os.kill(pids[who], signal.SIGKILL)
    await asyncio.wait_for(closing, 6)


AT_ONCE = """
import threading
from gymgate.stack.client import launch
start = launch._start
def start_and_be_killed(address):
    connection, process = start(address)
    say(process.pid)
    {}
    return connection, process
launch._start = start_and_be_killed
async def main():
    async with acquire(stack_config()):
        pass
asyncio.run(main())
"""
BEFORE_HELLO = """
from gymgate.stack.client.stack import Lease
async def hello(self, config):
    say(self.daemon.pid)
    await asyncio.Event().wait()
Lease.hello = hello
async def main():
    async with acquire(stack_config()):
        pass
asyncio.run(main())
"""
STARTS = """
async def main():
    async with acquire(stack_config(), progress=say):
        say("up")
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["before it connects", "before it says hello", "importing", "starting"])
async def test_an_sdk_process_that_dies_while_its_stack_starts(moment: str) -> None:
    """The daemon does not wait for it."""
    codes = {"before it connects": AT_ONCE.format("time.sleep(60)"), "before it says hello": BEFORE_HELLO}
    async with program(codes.get(moment, STARTS)) as sdk:
        if moment in codes:
            assert len(await sdk.numbers()) == 1
        else:
            await until(lambda: daemon_of(sdk.pid))
            line = ""
            while moment not in line:
                line = await sdk.line()
        sdk.signal(signal.SIGKILL)
        await sdk.ended(5)


async def test_an_sdk_process_that_ends_while_its_stack_starts() -> None:
    """It removes its sockets' directory, in which the daemon would look for its lock."""
    async with program(AT_ONCE.format("raise SystemExit")) as sdk:
        assert await all_gone(await sdk.numbers())


STOPS = """
async def main():
    stack = await connect(stack_config())
    say(*pids_of(await stack.status()))
    closing = asyncio.create_task(stack.close())
    await asyncio.sleep(float(sys.argv[1]))
    say("closing" if not closing.done() else "closed")
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_an_sdk_process_that_dies_while_its_stack_stops() -> None:
    """In the servers' period of grace: they do not outlive it."""
    async with program(STOPS, 0.05) as sdk:
        pids = await sdk.numbers()
        assert len(pids) == 4
        assert await sdk.line() == "closing"
        sdk.signal(signal.SIGKILL)
        await sdk.ended(5)
        assert await all_gone(pids)
