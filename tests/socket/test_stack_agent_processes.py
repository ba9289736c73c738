"""Agent processes: who gets one, when, and what is left of it. Real servers, no NeMo Gym."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from gymgate.core.errors import StackLostError, StackStartError
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.stack.daemon.agent_processes import AgentProcess, AgentProcessPool
from gymgate.stack.daemon.children import Child
from gymgate.stack.daemon.forkserver_client import ForkServerClient
from support.ledger import until
from support.upstream import upstream

PROGRAM = "import os, sys; sys.stdin.read()"


class Servers:
    """Starts a real server for each agent process, and kills it when it is told to."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.children: dict[int, Child] = {}
        self.failing = False
        self.listens = asyncio.Event()
        self.listens.set()
        self.killed: list[Child] = []
        """Those that were killed, and are not dead yet, while `dies_late`."""
        self.dies_late = False

    async def start(self, process: AgentProcess) -> None:
        await process.gateway_ports.port_for("policy_model")
        if self.failing:
            raise StackStartError("no such luck")
        server = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, start_new_session=True
        )
        self.started.append(server)
        fork_server = cast(ForkServerClient, self)
        ended = asyncio.get_running_loop().create_future()
        child = Child(f"agent process {process.number}", server.pid, Path(os.devnull), ended, fork_server)
        self.children[server.pid] = child
        process.adopt(child, "env")
        await self.listens.wait()

    def kill(self, child: Child, number: int = 9) -> None:
        if self.dies_late:
            self.killed.append(child)
            return
        process = next(each for each in self.started if each.pid == child.pid)
        process.kill()
        process.wait()
        child.exited.set_result(-9)

    @property
    def running(self) -> list[int]:
        return [process.pid for process in self.started if process.poll() is None]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@asynccontextmanager
async def running_pool(size: int) -> AsyncIterator[tuple[AgentProcessPool, Servers, Gateway]]:
    servers = Servers()
    async with Gateway() as gateway:
        pool = AgentProcessPool("env", size, gateway.agent_ports, servers.start)
        try:
            yield pool, servers, gateway
        finally:
            await pool.stop(0.0)
            servers.close()


@asynccontextmanager
async def route_of(gateway: Gateway) -> AsyncIterator[Route]:
    async with upstream() as policy:
        route = gateway.open(policy.endpoint())
        yield route
        await route.close()


async def call(process: AgentProcess) -> int:
    """The status that a call by the agent process gets."""
    url = f"http://127.0.0.1:{await process.gateway_ports.port_for('policy_model')}/v1/chat/completions"
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        return response.status


async def settled(pool: AgentProcessPool) -> None:
    await asyncio.gather(*pool._settling)


async def test_a_lease_sends_the_agents_calls_to_its_route_and_ends() -> None:
    async with running_pool(2) as (pool, _, gateway), route_of(gateway) as one, route_of(gateway) as two:
        async with pool.lease(one) as first, pool.lease(two) as second:
            assert [await call(first), await call(second)] == [200, 200]
            assert (len(one.calls), len(two.calls)) == (1, 1)
        assert await call(first) == 404


async def test_processes_are_given_in_the_order_of_asking() -> None:
    """One that is cancelled while it waits gives its place to the next."""
    order: list[int] = []

    async def rollout(pool: AgentProcessPool, route: Route, number: int) -> None:
        async with pool.lease(route):
            order.append(number)

    async with running_pool(1) as (pool, servers, gateway), route_of(gateway) as route:
        async with pool.lease(route):
            waiting = []
            for number in range(6):
                waiting.append(asyncio.create_task(rollout(pool, route, number)))
                await asyncio.sleep(0)  # it asks
            waiting[2].cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert order == [0, 1, 3, 4, 5]
        assert isinstance(results[2], asyncio.CancelledError)
        assert len(servers.started) == 6


async def test_the_process_that_stands_ready_is_taken_first() -> None:
    """Whichever rollout ended last."""
    async with running_pool(2) as (pool, servers, gateway), route_of(gateway) as route:
        await pool.start()
        async with AsyncExitStack() as first:
            await first.enter_async_context(pool.lease(route))
            async with AsyncExitStack() as second:
                await second.enter_async_context(pool.lease(route))
                await first.aclose()
                await settled(pool)
            await settled(pool)
        started = len(servers.started)
        async with pool.lease(route) as process:
            assert process.alive
            assert len(servers.started) == started


async def test_a_process_that_waits_for_a_model_is_not_the_one_to_wait_for() -> None:
    """The watch for servers that hang asks only those that rollouts wait for."""
    async with running_pool(1) as (pool, _, gateway), route_of(gateway) as route:
        task = asyncio.current_task()
        assert task is not None
        async with pool.lease(route) as process:
            process.rollouts.add(task)
            assert [needed for _, _, needed in pool.servers()] == [True]
            asking: Any = SimpleNamespace(in_flight={"policy_model": 1})
            process.gateway_ports.route = asking
            assert [needed for _, _, needed in pool.servers()] == [False]
            process.rollouts.clear()


async def test_nothing_starts_in_a_pool_that_stopped() -> None:
    async with running_pool(1) as (pool, servers, _):
        await pool.stop(0.0)
        with pytest.raises(StackLostError):
            await pool.start()
        assert servers.started == []


@pytest.mark.parametrize("how", ["ended", "cancelled"])
async def test_a_rollouts_process_ends_with_it(how: str) -> None:
    """Before the place is another rollout's, which a late call would reach."""
    async with running_pool(1) as (pool, servers, gateway), route_of(gateway) as route:
        held = asyncio.Event()

        async def rollout() -> None:
            async with pool.lease(route):
                held.set()
                if how == "cancelled":
                    await asyncio.Event().wait()

        running = asyncio.create_task(rollout())
        await held.wait()
        if how == "cancelled":
            running.cancel()
        async with pool.lease(route):
            assert servers.started[0].returncode == -9
            assert [process.poll() for process in servers.started[1:]] == [None]
        await asyncio.wait([running])


async def test_one_process_stands_ready_and_others_start_as_they_are_needed() -> None:
    async with running_pool(3) as (pool, servers, gateway), route_of(gateway) as route:
        await pool.start()
        assert len(servers.running) == 1
        async with pool.lease(route), pool.lease(route), pool.lease(route):
            assert len(servers.running) == 3
        await settled(pool)
        assert len(servers.running) == 1
        assert len(pool.describe()) == 1


async def test_a_process_that_dies_in_use_ends_its_rollout_and_is_replaced() -> None:
    async with running_pool(2) as (pool, servers, gateway), route_of(gateway) as route:
        async with pool.lease(route) as process:
            task = asyncio.create_task(asyncio.Event().wait())
            process.rollouts.add(task)
            assert process.server is not None
            servers.kill(process.server)
            await asyncio.wait([task], timeout=5)
            assert task.cancelled()
            assert "process 1" in str(process.error)
            process.rollouts.clear()
        async with pool.lease(route) as first, pool.lease(route) as second:
            assert first.alive
            assert second.alive
            assert (first.error, second.error) == (None, None)  # a later cancellation is none of that death


async def test_a_start_that_fails_is_that_rollouts_failure_and_keeps_no_process() -> None:
    async with running_pool(1) as (pool, servers, gateway), route_of(gateway) as route:
        servers.failing = True
        for _ in range(2):
            with pytest.raises(StackStartError, match="no such luck"):
                async with pool.lease(route):
                    pass
        servers.failing = False
        async with pool.lease(route) as process:
            assert process.alive


async def test_a_process_whose_start_is_cancelled_twice_is_handed_on_once_its_server_is_gone() -> None:
    """Else the next server would start at the first one's port."""
    async with running_pool(1) as (pool, servers, gateway), route_of(gateway) as route:

        async def rollout() -> None:
            async with pool.lease(route):
                pass

        servers.listens.clear()
        servers.dies_late = True
        first = asyncio.create_task(rollout())
        await until(lambda: len(servers.started) == 1)
        first.cancel()
        await until(lambda: servers.killed)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(rollout())
        await until(lambda: len(servers.killed) > 1)
        assert len(servers.started) == 1
        servers.dies_late = False
        servers.kill(servers.killed[0])
        servers.listens.set()
        await second
        assert len(servers.started) == 2


async def test_a_process_is_handed_on_whatever_goes_wrong_as_it_is_settled() -> None:
    """No file may be opened as the next process is to be started, or as the last one ends."""
    async with running_pool(1) as (pool, servers, gateway), route_of(gateway) as route:

        async def no_file(process: AgentProcess) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        async with pool.lease(route):
            starts, pool._start = pool._start, no_file
        await settled(pool)
        with pytest.raises(OSError, match="Too many open files"):
            async with asyncio.timeout(5), pool.lease(route):
                pass
        await settled(pool)
        pool._start = starts
        async with asyncio.timeout(5), pool.lease(route) as process:
            assert process.alive
        assert len(servers.started) == 2


async def test_a_process_that_cannot_be_ended_keeps_its_ports_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process in a wait of the kernel's survives SIGKILL for now; its late calls must not be the next rollout's."""
    monkeypatch.setattr("gymgate.stack.daemon.agent_processes.END_TIMEOUT_S", 0.1)
    monkeypatch.setattr("gymgate.stack.daemon.children.GRACE_S", 0.1)
    async with (
        running_pool(1) as (pool, servers, gateway),
        route_of(gateway) as one,
        route_of(gateway) as two,
    ):
        async with pool.lease(one) as first:
            monkeypatch.setattr(servers, "kill", lambda child, number=9: None)
        async with asyncio.timeout(10), pool.lease(two) as second:
            assert await call(first) == 404
            assert await call(second) == 200
            assert (len(one.calls), len(two.calls)) == (0, 1)
        monkeypatch.undo()
