"""The gateway's cost per call, beside the bare endpoint and a minimal aiohttp reverse proxy.

    ./dev python -m benchmarks gateway [--calls 3000] [--rounds 5] [--litellm PYTHON]

Every server is a process of its own on loopback, all under uvloop, and the rounds of all contenders alternate. A call
asks with about 4 KB of conversation, where no other size is given, and is answered at once with about 1 KB. The gateway
keeps every body, as it does by default. `--litellm` names an interpreter that has `litellm[proxy]`.

A round of 3,000 calls takes about 15 s on two cores, LiteLLM's proxy another 15 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.litellm_proxy import litellm_proxy
from benchmarks.machine import describe, print_table
from benchmarks.progress import Steps
from gymgate.core.config import HTTPEndpoint
from gymgate.gateway.server import Gateway
from gymgate.gateway.serving_process import relax_collector

ROUTES = 500
CONCURRENCY = 64
TEXT = "It is cold in San Francisco. " * 25
MESSAGES = [{"role": "user" if n % 2 == 0 else "assistant", "content": TEXT} for n in range(5)]
CHAT = json.dumps({"model": "m", "messages": MESSAGES, "temperature": 1.0}).encode()
SMALL = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 950}]}).encode()
LARGE = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "x" * ((1 << 20) - 200)}]}
).encode()
STREAM = json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode()
RESPONSES = json.dumps({"model": "m", "input": MESSAGES, "temperature": 1.0}).encode()
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
    }
).encode()


async def serve_endpoint(_: str, model: str | None) -> None:
    """Answers at once, always the same."""

    async def answer(request: web.BaseRequest) -> web.Response:
        await request.content.read()  # bodies of more than 1 MiB too
        return web.Response(body=ANSWER, content_type="application/json")

    server = web.Server(answer)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    print(json.dumps([f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"]), flush=True)
    await asyncio.Event().wait()


async def serve_proxy(target: str, model: str | None) -> None:
    """The usual reverse proxy in aiohttp: one catch-all route, one shared client session."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            headers = {"Content-Type": request.headers["Content-Type"]}
            async with session.post(f"{target}/chat/completions", data=body, headers=headers) as answer:
                content = await answer.read()
                return web.Response(body=content, status=answer.status, content_type=answer.content_type)

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(json.dumps([f"http://127.0.0.1:{runner.addresses[0][1]}/v1"]), flush=True)
        await asyncio.Event().wait()


async def serve_gateway(target: str, model: str | None) -> None:
    """As the stack's daemon serves it; `model` is the endpoint's name of it, if that is another than the agents'."""
    relax_collector()
    async with Gateway() as gateway:
        while True:  # one turn per round: rollouts end, and their calls with them
            routes = [gateway.open(HTTPEndpoint(base_url=target, model=model)) for _ in range(ROUTES)]
            print(json.dumps([route.base_url for route in routes]), flush=True)
            if not await asyncio.to_thread(sys.stdin.readline):
                return
            for route in routes:
                await route.close()


SERVERS = {"endpoint": serve_endpoint, "proxy": serve_proxy, "gateway": serve_gateway}


class Server:
    """A server process and the base URLs it said it has."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.urls: list[str] = []
        self.read()

    def read(self) -> None:
        assert self.process.stdout is not None
        self.urls = json.loads(self.process.stdout.readline())

    def renew(self) -> None:
        """Fresh routes, if it is a gateway."""
        if len(self.urls) > 1:
            assert self.process.stdin is not None
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.read()


class Fixed(Server):
    """One that is started elsewhere."""

    def __init__(self, url: str) -> None:
        self.urls = [url]


@contextlib.contextmanager
def server(role: str, target: str = "", *settings: str) -> Iterator[Server]:
    """A server that lives as long as the block."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--role", role, "--target", target, *settings]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


class Client(asyncio.Protocol):
    """One keep-alive connection, one call at a time, no more HTTP than the servers here speak."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        if end < 0 or self.waiter is None or self.waiter.done():
            return
        head = bytes(self.received[:end]).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(self.received) >= end + 4 + length:
            if not head.startswith(b"http/1.1 200"):
                self.waiter.set_exception(RuntimeError(bytes(self.received[:2000]).decode()))
            else:
                self.waiter.set_result(None)

    async def call(self, request: bytes) -> None:
        self.received.clear()
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self.waiter


@dataclass
class Contender:
    """Something that answers calls, and what was measured of it."""

    name: str
    server: Server
    operation: str = "chat/completions"
    body: bytes = CHAT
    share: float = 1.0
    """Of the calls of a round: big bodies and slow contenders get fewer."""
    beside: Contender | None = None
    """The one it is compared with."""
    latencies_ms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    sent: int = 0

    @property
    def port(self) -> int:
        return int(self.server.urls[0].split("/")[2].partition(":")[2])

    def request(self) -> bytes:
        """The next request; the routes take turns, as rollouts with a few calls each would."""
        urls = self.server.urls
        path = "/" + urls[self.sent % len(urls)].split("/", 3)[3]
        self.sent += 1
        head = (
            f"POST {path}/{self.operation} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


async def connect(contender: Contender) -> Client:
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(Client, "127.0.0.1", contender.port))[1]


async def measure_latency(contender: Contender, calls: int) -> None:
    client = await connect(contender)
    warm = 50 if contender.share == 1.0 else 5
    for number in range(int(calls * contender.share) + warm):
        started = time.perf_counter()
        await client.call(contender.request())
        if number >= warm:
            contender.latencies_ms.append((time.perf_counter() - started) * 1000)
    client.transport.close()


async def measure_rate(contender: Contender, calls: int) -> None:
    clients = [await connect(contender) for _ in range(CONCURRENCY)]

    async def work(client: Client) -> None:
        for _ in left:
            await client.call(contender.request())

    calls = int(calls * contender.share)
    left = iter(range(calls))
    started = time.perf_counter()
    await asyncio.gather(*(work(client) for client in clients))
    contender.rates.append(calls / (time.perf_counter() - started))
    for client in clients:
        client.transport.close()


async def measure(contenders: list[Contender], calls: int, rounds: int) -> None:
    steps = Steps(0.2 + rounds)
    steps.begin(f"{len(contenders)} contenders warm up", 0.2)
    for contender in contenders:
        await measure_rate(contender, calls // 5)  # warms connections and caches
        contender.rates.clear()
    for number in range(rounds):
        steps.begin(f"round {number + 1} of {rounds}")
        for contender in contenders:
            contender.server.renew()
            await measure_latency(contender, calls // 10)
        for contender in contenders:
            contender.server.renew()
            await measure_rate(contender, calls)


def report(contenders: list[Contender]) -> None:
    base_ms = statistics.median(contenders[0].latencies_ms)
    print(describe("aiohttp", "uvloop", "orjson"))
    rows = []
    for contender in contenders:
        median = statistics.median(contender.latencies_ms)
        p99 = statistics.quantiles(contender.latencies_ms, n=100)[98]
        rate = statistics.median(contender.rates)
        beside = contender.beside or contender
        ratio = rate / statistics.median(beside.rates)
        numbers = [f"{value:.2f}" for value in (median, median - base_ms, p99)]
        rows.append([contender.name, *numbers, f"{rate:.0f}", f"{ratio:.2f}"])
    print_table(
        ["contender", "c=1 median ms", "added ms", "p99 ms", f"c={CONCURRENCY} calls/s", "of the proxy"], rows
    )


def line_up(endpoint: Server, proxy: Server, gateway: Server) -> list[Contender]:
    """The endpoint first, then the minimal proxy."""
    plain = Contender("minimal aiohttp proxy", proxy)
    small = Contender("minimal aiohttp proxy, 1 KB", proxy, body=SMALL)
    large = Contender("minimal aiohttp proxy, 1 MB", proxy, body=LARGE, share=0.05)
    return [
        Contender("endpoint itself", endpoint, beside=plain),
        plain,
        Contender("gateway, chat to chat", gateway, beside=plain),
        Contender("gateway, chat to chat, streamed", gateway, body=STREAM, beside=plain),
        Contender("gateway, Responses to chat", gateway, "responses", RESPONSES, beside=plain),
        small,
        Contender("gateway, chat to chat, 1 KB", gateway, body=SMALL, beside=small),
        large,
        Contender("gateway, chat to chat, 1 MB", gateway, body=LARGE, share=0.05, beside=large),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000, help="per contender and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--litellm", metavar="PYTHON")
    parser.add_argument("--role", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.role:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(SERVERS[options.role](options.target, options.model))
        return
    with contextlib.ExitStack() as servers:
        endpoint = servers.enter_context(server("endpoint"))
        proxy = servers.enter_context(server("proxy", endpoint.urls[0]))
        gateway = servers.enter_context(server("gateway", endpoint.urls[0]))
        contenders = line_up(endpoint, proxy, gateway)
        if options.litellm:
            url = servers.enter_context(litellm_proxy(options.litellm, endpoint.urls[0], "m"))
            contenders.append(Contender("LiteLLM's proxy", Fixed(url), share=0.1, beside=contenders[1]))
        uvloop.run(measure(contenders, options.calls, options.rounds))
    report(contenders)


if __name__ == "__main__":
    main()
