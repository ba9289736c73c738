"""The HTTP client and servers that answer late, in parts, twice or not at all, with and without resets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import simloom
from invariants import Ledger, Violation, within
from parts import HTTPClient, HTTPFailure, Request
from universes import Scene

from scenes.faults import happen, one_of, seconds

SERVERS, REQUESTS, IN_A_ROW = 2, 6, 3
LOOPBACK = "127.0.0.1"
PORT = 8000
TIMEOUT_S = 5.0
UNNOTICED_S = 0.2
"""For the end of a connection to reach the client: two times the longest way."""
BEHAVIOURS = [
    "answers",
    "answers",
    "answers",
    "answers in parts",
    "closes after it",
    "closes instead",
    "is silent",
    "answers twice",
]


class Server(asyncio.Protocol):
    """Answers each request with its own body, as it pleases."""

    def __init__(self, name: str, ledger: Ledger, breaks: Callable[[str], None]) -> None:
        self.name = name
        self.ledger = ledger
        self.breaks = breaks
        self.requests = 0
        self.buffer = b""
        self.answering: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for task in self.answering:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(rest) >= length:
            self.buffer = rest[length:]
            self.requests += 1
            task = asyncio.create_task(self.answer(rest[:length]))
            self.answering.add(task)
            task.add_done_callback(self.answering.discard)

    async def answer(self, body: bytes) -> None:
        name = body.decode()
        self.ledger.paid[name] += 1
        self.ledger.reached(name.partition("/")[0], self.name)
        self.ledger.deserved[name] = body
        behaviour = one_of("behaviour", BEHAVIOURS)
        simloom.reached(behaviour)
        if behaviour in ("closes instead", "is silent"):
            self.ledger.excuses[name] += 1
        if behaviour == "is silent":
            return
        await asyncio.sleep(seconds("answer", 2.0))
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        if behaviour == "closes instead":
            self.transport.close()
        elif behaviour == "answers in parts":
            for at in range(0, len(answer), 20):
                self.transport.write(answer[at : at + 20])
                await asyncio.sleep(0.05)
        else:
            self.transport.write(answer)
            requests = self.requests
            await asyncio.sleep(one_of("until it does more", [0, 0, 0.01, 0.1]))
            # Else no client could tell whose answer it is.
            unread = self.transport._inbox or self.transport._pending or requests != self.requests
            if behaviour == "answers twice" and not unread:
                self.breaks(self.name)
                self.transport.write(answer)
            if behaviour == "closes after it":
                self.breaks(self.name)
                self.transport.close()


async def play(world: Any, ledger: Ledger) -> None:
    loop = asyncio.get_running_loop()
    hosts, serving = [world.host(f"server{n}") for n in range(SERVERS)], []
    broken: dict[str, float] = {}
    """When a connection to a server was broken last."""

    def breaks(server: str) -> None:
        broken[server] = loop.time()

    async def serve(name: str) -> None:
        where = (LOOPBACK, PORT + int(name[-1])) if is_near else (name, PORT)
        async with await loop.create_server(lambda: Server(name, ledger, breaks), *where) as server:
            await server.serve_forever()

    async def ask_all(number: int) -> None:
        await asyncio.sleep(seconds("start", 6.0))
        for place in range(IN_A_ROW):
            await ask(f"{number}.{place}")

    async def ask(number: str) -> None:
        server = one_of("server", hosts).name
        name = f"{server}/{number}"
        ledger.asked.add(name)
        began = loop.time()
        try:
            with within(TIMEOUT_S, name):
                async with asyncio.timeout(None) as patience:
                    if simloom.sometimes("given up", 10):
                        patience.reschedule(began + seconds("patience", 3.0))
                    response = await client.send(requests[server], name.encode(), timeout_s=TIMEOUT_S)
            ledger.ended(name, response.body)
        except (HTTPFailure, TimeoutError) as error:
            if patience.expired() or broken.get(server, -1.0) >= began - UNNOTICED_S:
                ledger.excuses[name] += 1
            ledger.ended(name, failed=f"{type(error).__name__}: {error}")

    def reset(host: Any) -> Any:
        def fault() -> None:
            breaks(host.name)
            world.net.reset_connections(None, host)

        return fault

    if is_near := simloom.sometimes("on this machine", 50):
        world.net.set_latency(0, 0)
    for host in hosts:
        serving.append(host.spawn(lambda name=host.name: serve(name)))
    await asyncio.sleep(0.01)
    requests = {
        host.name: Request(f"http://{LOOPBACK}:{PORT + n}/v1" if is_near else f"http://{host.name}:{PORT}/v1")
        for n, host in enumerate(hosts)
    }
    client = HTTPClient()
    async with client:
        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(ask_all(number))
            if simloom.sometimes("with resets", 50):
                await happen(
                    {"reset of one": reset(hosts[0]), "reset of the other": reset(hosts[1])},
                    most=4,
                    over_s=6.0,
                )
        await asyncio.sleep(0.01)  # for connections that were given up
        idle = {connection for waiting in client._idle.values() for connection in waiting}
        if unused := [connection for connection in client._open - idle if connection.is_usable]:
            raise Violation(f"{len(unused)} connections stay open, and nothing uses them")
    ledger.left["open connections"] = lambda: len(client._open)
    for task in serving:
        task.cancel()


SCENE = Scene(
    "http",
    play,
    (
        *sorted(set(BEHAVIOURS)),
        "given up",
        "on this machine",
        "with resets",
        "reset of one",
        "reset of the other",
    ),
    deadline_s=30,
)
