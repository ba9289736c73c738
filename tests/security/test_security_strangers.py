"""Another user of the machine, and another caller of the stack, at the gateway's ports without a key."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gymgate.core.config import HTTPEndpoint
from gymgate.gateway import newcomers
from gymgate.gateway.server import Gateway
from support.upstream import RawConnection, upstream

NOBODY = 65534
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
BURST = 250
BURSTS = 4

SEND_AND_CLOSE = """
import encodings.idna, os, socket, sys, time
count, ends, *ports = map(int, sys.argv[1:])
os.setuid(65534)
said = sys.stdin.buffer.read()
head = b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: g\\r\\nContent-Length: %d\\r\\n\\r\\n"
kept = []
for number in range(count):
    body = said + b" " * (4 * number + ends)  # else it is the same call, sent again
    request = head % len(body) + body
    sending = socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=30)
    sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # the request and the end in one segment
    sending.sendall(request)
    if number % 4 < ends:
        sending.close()
    else:
        sending.shutdown(socket.SHUT_WR)
        kept.append(sending)
deadline = time.monotonic() + 2
while time.monotonic() < deadline:
    rows = [line.split() for line in open("/proc/net/tcp")][1:]
    mine = [row for row in rows if int(row[2].split(":")[1], 16) in ports and row[7] == "65534"]
    if len(mine) <= len(kept):
        break
"""
"""Sends requests as another user and closes each connection at once, or its sending half. Ends when the kernel no longer knows
whose the closed ones were."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
loops = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run(loop: Callable[[], asyncio.AbstractEventLoop], attack: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await attack()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bounded())


async def answered(gateway: Gateway) -> None:
    """Return when the gateway has answered what came before."""
    for _ in range(3):
        connection = await RawConnection.open(gateway.port)
        await connection.post("/v1/nothing", b"")
        assert (await connection.answer())[0] == 404
        await connection.drop()


@needs_root
@loops
def test_a_sender_that_is_gone_makes_no_call(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """The kernel gives user 0 for a socket that is closed. The gateway looks late: its loop stands still during each burst."""

    async def attack() -> None:
        async with upstream() as endpoint, Gateway(judges={"judge": endpoint.endpoint()}) as gateway:
            ports = gateway.agent_ports()
            victim = ports.route = gateway.open(endpoint.endpoint())
            attacked = [await gateway.port_for("judge"), await ports.port_for("policy_model")]
            for ends in range(1, BURSTS + 1):
                words = [sys.executable, "-I", "-S", "-c", SEND_AND_CLOSE, str(BURST), str(ends)]
                subprocess.run([*words, *map(str, attacked)], input=BODY, timeout=30, check=True)  # noqa: ASYNC221 the loop is late
                await answered(gateway)
            assert (len(endpoint.seen), len(victim.log), gateway.keyless.counts.total()) == (0, 0, 0)
            assert victim.failure is None
            assert gateway.keyless.judges.failure is None

    run(loop, attack)


@loops
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0"])
def test_the_gateway_does_not_serve_its_own_calls(
    loop: Callable[[], asyncio.AbstractEventLoop], host: str
) -> None:
    """A caller that gives a port of the gateway as its policy gets nothing that another caller pays for."""

    async def attack() -> None:
        async with upstream() as paid, Gateway(judges={"judge": paid.endpoint()}) as gateway:
            ports = gateway.agent_ports()
            victim = ports.route = gateway.open(paid.endpoint())
            for port in (await gateway.port_for("judge"), await ports.port_for("policy_model")):
                assert await asked(gateway, f"http://{host}:{port}/v1") == 401
            assert (paid.seen, victim.log, gateway.keyless.counts.total()) == ([], [], 0)

    run(loop, attack)


@pytest.mark.parametrize("headers", [{}, {"via": "1.0 other", "User-Agent": "other"}])
async def test_a_gateway_does_not_serve_the_calls_of_another_stack(headers: dict[str, str]) -> None:
    """Of the same user, e.g. one that serves other callers."""
    async with (
        upstream() as paid,
        Gateway() as calling,
        Gateway(judges={"judge": paid.endpoint()}) as gateway,
    ):
        ports = gateway.agent_ports()
        victim = ports.route = gateway.open(paid.endpoint())
        for port in (await gateway.port_for("judge"), await ports.port_for("policy_model")):
            assert await asked(calling, f"http://127.0.0.1:{port}/v1", headers=headers) == 401
        assert (paid.seen, victim.log, gateway.keyless.counts.total()) == ([], [], 0)


async def asked(gateway: Gateway, url: str, **fields: Any) -> int:
    """The status that a caller with this policy gets for a call."""
    route = gateway.open(HTTPEndpoint(base_url=url, max_retries=0, **fields))
    connection = await RawConnection.open(gateway.port)
    await connection.post(f"/ng-rollout/{route.key}/v1/chat/completions", BODY)
    status, _ = await connection.answer()
    await connection.drop()
    return status


HOLD = """
import encodings.idna, os, socket, sys
uid, count, port = map(int, sys.argv[1:])
os.setuid(uid)
held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(count)]
for one in held[::2]:
    one.sendall(b"GET / HTTP/1.1\\r\\nHost: g\\r\\n\\r\\n")  # a request that is answered to anybody
print("holds", flush=True)
for one in held:  # until the other end closes it
    try:
        while one.recv(1000):
            pass
    except ConnectionError:
        pass
"""
"""Holds connections, and ends when the other end has closed all of them."""


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@asynccontextmanager
async def held(uid: int, count: int, gateway: Gateway) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of a user that holds connections."""
    words = ["-I", "-S", "-c", HOLD, str(uid), str(count), str(gateway.port)]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"holds\n"
        await answered(gateway)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@needs_root
@loops
def test_another_user_holds_few_connections_and_not_for_long(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are silent or were answered. This user's own connections stay, as idle as they are."""
    monkeypatch.setattr(newcomers, "ADMISSION_S", 3.0)

    async def attack() -> None:
        async with (
            upstream() as endpoint,
            Gateway() as gateway,
            held(os.getuid(), 60, gateway) as own,
        ):
            before = open_files()
            route = gateway.open(endpoint.endpoint())
            connection = await RawConnection.open(gateway.port)
            async with held(NOBODY, 300, gateway) as others:
                assert open_files() <= before + newcomers.MOST + 5
                for _ in range(20):
                    await connection.post(f"/ng-rollout/{route.key}/v1/chat/completions", BODY)
                    assert (await connection.answer())[0] == 200
                await others.wait()
            await connection.post(f"/ng-rollout/{route.key}/v1/chat/completions", BODY)
            assert (await connection.answer())[0] == 200
            assert own.returncode is None
            assert open_files() >= before
            await connection.drop()

    run(loop, attack)
