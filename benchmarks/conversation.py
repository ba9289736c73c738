"""What a call of a long conversation costs in the gateway, beside a minimal aiohttp reverse proxy.

    ./dev python -m benchmarks conversation [--conversations 20] [--kilobytes 10]

Each turn adds 10 KB: one long text, or forty short items. At turns 1, 10 and 100 the CPU time of the server's process for one
call is measured, over all conversations, which take turns as rollouts do; beside it stands how long orjson takes to parse
that body once. The endpoint's model has another name than the agent sends, as in most runs, so the gateway writes each body
anew. Memory is what one conversation of 100 turns adds to the process while its rollout lasts, record included.
Takes about a minute and a half on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import uvloop

from benchmarks.gateway import ANSWER, Client, Contender, connect, server
from benchmarks.machine import describe, print_table, pss_mb
from benchmarks.progress import Steps

TURNS = (1, 10, 100)
PIECE = 'The quick brown fox jumps over 12 lazy dogs and says "why?"\n'
REPLY: str = json.loads(ANSWER)["choices"][0]["message"]["content"]
Turn = Callable[[int, int], list[dict[str, Any]]]


def long_text(turn: int, size: int) -> list[dict[str, Any]]:
    """One message of `size` bytes."""
    return [{"role": "user", "content": f"{turn} " + PIECE * (size // len(PIECE))}]


def short_items(turn: int, size: int) -> list[dict[str, Any]]:
    """Messages of about 250 bytes each, `size` bytes together."""
    return [{"role": "user", "content": f"{turn}.{n} " + PIECE * 3} for n in range(size // 250)]


SHAPES: dict[str, Turn] = {"one long text": long_text, "short items": short_items}


def bodies(turn: Turn, size: int, field: str) -> list[bytes]:
    """The requests of one conversation, in the compact JSON that OpenAI's SDK writes."""
    history: list[dict[str, Any]] = []
    requests = []
    for number in range(max(TURNS)):
        history += turn(number, size)
        requests.append(orjson.dumps({"model": "m", field: history, "temperature": 1.0}))
        history.append({"role": "assistant", "content": REPLY})
    return requests


def cpu_ms(pid: int) -> float:
    """Milliseconds of CPU time that a process has used, more exactly than the clock ticks of its stat."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


async def converse(
    contender: Contender, requests: list[bytes], conversations: int
) -> tuple[list[float], float]:
    """Return CPU ms of a call at each of `TURNS`, and the MB that a conversation of all turns adds."""
    pid = contender.server.process.pid
    client: Client = await connect(contender)
    contender.body = requests[0]
    for _ in range(conversations):
        await client.call(contender.request())  # connections and caches
    contender.server.renew()
    before_mb, costs = pss_mb(pid), []
    for number, body in enumerate(requests, 1):
        contender.body, contender.sent = body, 0
        started = cpu_ms(pid)
        for _ in range(conversations):
            await client.call(contender.request())
        if number in TURNS:
            costs.append((cpu_ms(pid) - started) / conversations)
    client.transport.close()
    added_mb = (pss_mb(pid) - before_mb) / conversations
    contender.server.renew()
    return costs, added_mb


def parse_ms(body: bytes) -> float:
    """Milliseconds that orjson takes for a body, the best of some."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        orjson.loads(body)
        times.append(time.perf_counter() - started)
    return min(times) * 1000


CONTENDERS = {
    "minimal aiohttp proxy": ("proxy", "chat/completions", "messages"),
    "gateway, chat to chat": ("gateway", "chat/completions", "messages"),
    "gateway, Responses to chat": ("gateway", "responses", "input"),
}
"""Server, operation, and the field of a request that holds the conversation."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--kilobytes", type=int, default=10, help="that each turn adds")
    parser.add_argument("--rounds", type=int, default=3, help="the median of which is printed")
    options = parser.parse_args(argv)
    rows = []
    size = options.kilobytes * 1000
    with server("endpoint") as endpoint:
        steps = Steps(float(len(SHAPES) * options.rounds * len(CONTENDERS)))
        for shape, turn in SHAPES.items():
            measured: dict[str, list[tuple[list[float], float]]] = {}
            for number in range(options.rounds):
                for name, (role, operation, field) in CONTENDERS.items():
                    steps.begin(f"{shape}, round {number + 1} of {options.rounds}: {name}")
                    requests = bodies(turn, size, field)
                    with server(role, endpoint.urls[0], "--model", "served") as contender:
                        conversing = converse(
                            Contender(name, contender, operation), requests, options.conversations
                        )
                        measured.setdefault(name, []).append(uvloop.run(conversing))
            requests = bodies(turn, size, "messages")
            rows += table_of(shape, measured, [parse_ms(requests[number - 1]) for number in TURNS])
    print(describe("aiohttp", "uvloop", "orjson"))
    heads = [f"turn {turn}: CPU ms" for turn in TURNS]
    print_table(["conversation", *heads, f"at turn {TURNS[-1]}: parses more than the proxy", "MB"], rows)


def table_of(
    shape: str, measured: dict[str, list[tuple[list[float], float]]], parses: list[float]
) -> list[list[str]]:
    rows = [[f"{shape}: orjson parses the body", *(f"{ms:.2f}" for ms in parses), "", ""]]
    proxy_ms: float | None = None
    for name, results in measured.items():
        costs = [statistics.median(values) for values in zip(*(costs for costs, _ in results), strict=True)]
        added_mb = statistics.median(mb for _, mb in results)
        proxy_ms = costs[-1] if proxy_ms is None else proxy_ms
        more = (costs[-1] - proxy_ms) / parses[-1]
        rows.append([f"{shape}: {name}", *(f"{ms:.2f}" for ms in costs), f"{more:.2f}", f"{added_mb:.1f}"])
    return rows


if __name__ == "__main__":
    main()
