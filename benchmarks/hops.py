"""Where the time of one rollout at a time goes: between its model calls, and in which process.

    ./dev python -m benchmarks hops [--rollouts 200] [--rounds 3]

example_single_tool_call, two model calls and one tool call, by bare `/run`, the same with a rollout's id in each row, which NeMo
Gym's servers then pass on, and through gymgate, in turn. The policy notes
when each call came and went, which cuts a rollout into what is before the first call, between the calls and after the last.
Beside it stands the processor time that a rollout took in each process: wall time that no process used is waiting for a
process to be woken. A round takes about 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks import scripted_policy
from benchmarks.contenders import Run
from benchmarks.machine import Processors, describe, print_processors, print_table
from benchmarks.progress import Steps
from benchmarks.rollouts import contenders
from gymgate.core.config import RuntimeConfig

PARTS = ["whole", "before call 1", "policy", "between the calls", "policy", "after call 2"]
CALLS = 2
Found = dict[str, dict[str, list[float]]]
"""Milliseconds, by contender and part."""


async def serve() -> None:
    """The scripted policy; `GET .../log` gives the times since the last one, as of `time.perf_counter`."""
    noted: list[tuple[float, float]] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("/log"):
            found = list(noted)
            noted.clear()
            return web.json_response({"calls": found})
        came = time.perf_counter()
        response = await scripted_policy.answer(request)
        noted.append((came, time.perf_counter()))
        return response

    await scripted_policy.serve(answer)


async def one_at_a_time(rows: list[Any], count: int, run: Run) -> list[tuple[float, float]]:
    """When each rollout began and ended."""
    times = []
    for number in range(count):
        started = time.perf_counter()
        assert await run(rows[number % len(rows)]) is not None
        times.append((started, time.perf_counter()))
    return times


def with_id(run: Run) -> Run:
    """The same with a new id in each row."""
    return lambda row: run({**row, "_ng_rollout_id": secrets.token_hex(16)})


def parts(rollout: tuple[float, float], calls: list[list[float]]) -> list[float]:
    """Seconds of each of `PARTS`."""
    (began, ended), ((came, went), (came_again, went_again)) = rollout, calls
    return [
        ended - began,
        came - began,
        went - came,
        came_again - went,
        went_again - came_again,
        ended - went_again,
    ]


async def measure(args: argparse.Namespace, url: str) -> tuple[Found, Found]:
    """Medians' raw material, and processor time a rollout."""
    walls: Found = defaultdict(lambda: defaultdict(list))
    used: Found = defaultdict(lambda: defaultdict(list))
    steps = Steps(args.rounds)
    async with contenders(RuntimeConfig(), url) as (rows, runs), aiohttp.ClientSession() as session:

        async def log() -> dict[str, Any]:
            async with session.get(f"{url}/log") as response:
                found: dict[str, Any] = await response.json()
                return found

        for number in range(args.rounds):
            steps.begin(f"round {number + 1} of {args.rounds}: {args.rollouts} rollouts of each")
            for name, run in {
                "bare": runs["bare"],
                "bare, rows with an id": with_id(runs["bare"]),
                **runs,
            }.items():
                if "replay" in name:
                    continue
                await one_at_a_time(rows, len(rows), run)
                await log()
                processors = Processors()
                times = await one_at_a_time(rows, args.rollouts, run)
                for kind, seconds in processors.since().items():
                    used[name][kind].append(seconds / args.rollouts * 1000)
                calls = (await log())["calls"]
                assert len(calls) == CALLS * len(times)
                for index, rollout in enumerate(times):
                    for part, seconds in enumerate(
                        parts(rollout, calls[CALLS * index : CALLS * (index + 1)])
                    ):
                        walls[name][str(part)].append(seconds * 1000)
    return walls, used


def print_found(walls: Found, used: Found) -> None:
    """Medians in milliseconds."""
    rows = [
        [name, *(f"{statistics.median(found[str(part)]):.2f}" for part in range(len(PARTS)))]
        for name, found in walls.items()
    ]
    print_table(["ms, c=1", *PARTS], rows)
    print_processors("processor ms a rollout", used)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=200, help="of each contender in each round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    print(describe("aiohttp"), flush=True)
    with scripted_policy.program("benchmarks.hops", "serve") as url:
        print_found(*asyncio.run(measure(args, url)))


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    else:
        main()
