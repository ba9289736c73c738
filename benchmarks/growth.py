"""What grows with routes, environments and dataset rows, and how.

    ./dev python -m benchmarks growth [--routes 10,100,1000,10000] [--environments 1,4,8,16,20] [--rows 1e3,1e5,1e6,1e7]

Each part runs alone with its option and the others set to nothing (`--rows ''`). Routes: as many live rollouts' routes
in one gateway, calls spread over all of them. Environments: one stack of the first N of a list that needs no packages
of its own. Rows: a file of about 450 bytes a row, opened, iterated to the 100th row, indexed, and read at random, right
after it was written, so from memory where that suffices. 1e7 rows take 5 GB of disk (under TMPDIR) and about a minute on
two cores; each other part ends within a minute. A size for which the disk has no room is left out, and that is said.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from benchmarks.contenders import memory_mb
from benchmarks.machine import describe, print_table, pss_mb
from benchmarks.progress import Steps, say
from benchmarks.scripted_policy import scripted_policy
from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.rollouts import RowFile
from gymgate.stack import acquire

ENVIRONMENTS = (
    "example_single_tool_call",
    "example_session_state_mgmt",
    "example_multi_step",
    "workplace_assistant",
    "calendar",
    "circle_click",
    "circle_count",
    "example_tool_call_multireward",
    "equivalence_rule",
    "example_multi_turn_gymnasium",
    "bunsenbench_chemistry_mcq",
    "citation_if",
    "format_verification",
    "gpqa_diamond",
    "gui_coordinate",
    "hotpotqa_qa",
    "nvarc",
    "ragtruth",
    "spartqa",
    "string_match",
)
CALLS = 2000
READS = 2000
ROW_BYTES = 460
BLOCK = 10_000
"""Rows written at once."""


async def measure_routes(counts: list[int], url: str) -> list[list[str]]:
    """Memory and time of a call, with so many routes alive."""
    cells = []
    steps = Steps(sum(counts) + CALLS * len(counts))
    body = {"model": "m", "input": [{"role": "user", "content": "x" * 2000}]}
    async with Gateway() as gateway, aiohttp.ClientSession() as session:
        endpoint = HTTPEndpoint(base_url=url, dialect="responses")
        routes: list[Route] = []

        async def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                route = routes[number * 7919 % len(routes)]
                async with session.post(f"{route.base_url}/responses", json=body) as response:
                    assert response.status == 200
                    await response.read()

        for count in counts:
            steps.begin(f"{count:,} live routes", count + CALLS)
            before, had, started = pss_mb(os.getpid()), len(routes), time.perf_counter()
            routes += [gateway.open(endpoint) for _ in range(count - len(routes))]
            opened_s = time.perf_counter() - started
            grown_mb = pss_mb(os.getpid()) - before
            numbers = iter(range(CALLS))
            started = time.perf_counter()
            await asyncio.gather(*(work(numbers) for _ in range(20)))
            each_ms = (time.perf_counter() - started) / CALLS * 1000
            new = count - had
            cells.append(
                [
                    f"{count:,}",
                    f"{opened_s / new * 1e6:.0f}",
                    f"{grown_mb * 1024 / new:.1f}",
                    f"{each_ms:.2f}",
                ]
            )
        for route in routes:
            await route.close()
    return cells


async def measure_environments(counts: list[int]) -> list[list[str]]:
    """Start and memory of a stack of the first N environments."""
    cells = []
    steps = Steps(sum(counts))
    for count in counts:
        steps.begin(f"a stack of {count} environments", count)
        started = time.perf_counter()
        async with acquire(StackConfig(environments=ENVIRONMENTS[:count])) as stack:
            ready_s = time.perf_counter() - started
            memory = await memory_mb(stack)
        cells.append([str(count), f"{ready_s:.1f}", f"{memory:.0f}", f"{memory / count:.0f}"])
    return cells


def measure_rows(counts: list[int], directory: Path) -> list[list[str]]:
    """Open, index and random reads of a file, and the memory that they take."""
    cells = []
    steps = Steps(sum(counts))
    for count in counts:
        steps.begin(f"a file of {count:,} rows", count)
        if shutil.disk_usage(directory).free < 2 * ROW_BYTES * count:
            say(f"left out: {count:,} rows need {2 * ROW_BYTES * count / 1e9:.0f} GB free under {directory}")
            continue
        path = directory / f"{count}.jsonl"
        write_rows(path, count)
        before, started = pss_mb(os.getpid()), time.perf_counter()
        rows = RowFile(path)
        for number, _ in enumerate(rows.numbered()):
            if number == 99:
                break
        first_s, started = time.perf_counter() - started, time.perf_counter()
        assert len(rows) == count
        index_s = time.perf_counter() - started
        randomness = random.Random(count)
        started = time.perf_counter()
        for _ in range(READS):
            assert rows.numbered_at(randomness.randrange(count))[1]
        read_us = (time.perf_counter() - started) / READS * 1e6
        grown = pss_mb(os.getpid()) - before
        started = time.perf_counter()
        assert len(RowFile(path)) == count
        again_s = time.perf_counter() - started
        cells.append(
            [
                f"{count:,}",
                f"{first_s * 1000:.1f}",
                f"{index_s:.2f}",
                f"{again_s * 1000:.1f}",
                f"{read_us:.0f}",
                f"{grown:.0f}",
            ]
        )
        path.unlink()
    return cells


def write_rows(path: Path, count: int) -> None:
    start = f'{{"responses_create_params": {{"input": [{{"role": "user", "content": "{"x" * 375}"}}]}}, "n": '
    with path.open("w") as file:
        for first in range(0, count, BLOCK):
            numbers = range(first, min(first + BLOCK, count))
            file.write("".join([f"{start}{number}}}\n" for number in numbers]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routes", type=_numbers, default=[10, 100, 1000, 10000])
    parser.add_argument("--environments", type=_numbers, default=[1, 4, 8, 16, 20])
    parser.add_argument("--rows", type=_numbers, default=[1000, 100_000, 1_000_000, 10_000_000])
    args = parser.parse_args(argv)
    print(describe("aiohttp"), flush=True)
    if args.routes:
        with scripted_policy() as url:
            found = asyncio.run(measure_routes(args.routes, url))
        print_table(["live routes", "open, µs each", "KB each", "a call at c=20, ms"], found)
    if args.environments:
        found = asyncio.run(measure_environments(args.environments))
        print_table(["environments", "ready, s", "memory (PSS), MB", "MB each"], found)
    if args.rows:
        with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name:
            found = measure_rows(args.rows, Path(name))
        head = ["rows", "first 100, ms", "index, s", "open again, ms", "random read, µs", "memory, MB"]
        print_table(head, found)


def _numbers(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
