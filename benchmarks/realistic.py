"""A policy as slow and uneven as a model: wall time over the ideal, what a call and a rollout gain in time, CPU, memory.

With stock servers and with lean ones:

    ./dev python -m benchmarks realistic [--concurrency 64,128,512,2048] [--waves 1] [--limit-s 100]
    ./dev python -m benchmarks realistic --answer-s 240 --without-bare

Each rollout makes 1 to 8 calls of 50 ms to 2 s (log-normal). The ideal is the same rollouts in the same order on as
many workers with nothing taking time but the policy. Bare `/run` over the same servers stands beside it: what NeMo Gym
itself takes on this machine. Every level has `--waves` times its concurrency in rollouts. A second table says what each
process took for a rollout.

With `--answer-s` each rollout calls its tool at once and gets its answer after so many seconds, and the concurrency is, unless
given, the most that the limit on open files allows: with `--without-stock` those on lean servers, which need fewer.

A contender that has not ended a level after `--limit-s` is cut off: its row says how many rollouts had ended, and its wall
time is a lower bound. So the program ends after 3 x levels x limit at most; two cores take about 40 s a wave of 2,048.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from benchmarks.contenders import ENVIRONMENT, bare_agent
from benchmarks.delayed_policy import delayed_policy, make_plan, row_with
from benchmarks.machine import cpu_s, descendants, describe, files_of, numbers, print_table, pss_mb
from benchmarks.progress import Steps, say
from gymgate.core.config import HTTPEndpoint, RuntimeConfig, StackConfig
from gymgate.gateway.serving_process import FEW_FILES_PER_ROLLOUT, FILES_PER_ROLLOUT, max_rollouts
from gymgate.gym.catalog import Catalog
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack import Stack, acquire

TOLD_S = 10.0
SAMPLED_S = 4.0


class Usage(NamedTuple):
    """What a process has used of a machine."""

    cpu_s: float
    memory_mb: float
    files: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        return cls(cpu_s(pid), pss_mb(pid), files_of(pid))

    def since(self, before: Usage) -> Usage:
        return Usage(self.cpu_s - before.cpu_s, self.memory_mb - before.memory_mb, self.files - before.files)

    def or_more(self, other: Usage) -> Usage:
        return Usage(
            max(self.cpu_s, other.cpu_s),
            max(self.memory_mb, other.memory_mb),
            max(self.files, other.files),
        )


@dataclass
class Level:
    """What one contender showed at one concurrency."""

    name: str
    concurrency: int
    ideal_s: float
    wall_s: float = 0.0
    rollout_added_s: list[float] = field(default_factory=list)
    """Of each rollout: its time less its policy's."""
    call_added_s: list[float] = field(default_factory=list)
    """Of each call: as the gateway saw it, less the policy's sleep."""
    cpu_s: float = 0.0
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    rollouts: int = 0
    """To be run; fewer have ended if time ran out."""
    used: dict[str, Usage] = field(default_factory=dict)
    """Of each process of gymgate's and NeMo Gym's: CPU time, and the most memory and files beyond those it began with."""

    @property
    def ended(self) -> int:
        return len(self.rollout_added_s)

    def cells(self) -> list[str]:
        whole = self.ended == self.rollouts
        partial = "" if whole else f" ({self.ended:,} of {self.rollouts:,} ended in time)"
        return [
            f"{self.name}, c={self.concurrency:,}{partial}",
            f"{'' if whole else '> '}{self.wall_s / self.ideal_s:.2f}",
            _ms(self.rollout_added_s, 50),
            _ms(self.rollout_added_s, 99),
            _ms(self.call_added_s, 50),
            _ms(self.call_added_s, 99),
            f"{self.cpu_s / self.ended * 1000:.1f}" if whole else "-",
            f"{self.memory_mb * 1024 / self.concurrency:.0f}" if self.used else "-",
            str(self.failed),
        ]

    @property
    def memory_mb(self) -> float:
        """Of gymgate's processes."""
        return sum(max(0.0, self.used[name].memory_mb) for name in OURS)

    def process_rows(self) -> list[list[str]]:
        ended = max(1, self.ended)
        rest_s = self.cpu_s - sum(usage.cpu_s for usage in self.used.values())
        return [
            [
                f"{name}, c={self.concurrency:,}",
                f"{usage.cpu_s / ended * 1000:.1f}",
                f"{usage.memory_mb * 1024 / self.concurrency:.0f}",
                f"{usage.files / self.concurrency:.2f}",
            ]
            for name, usage in {**self.used, "the policy and others": Usage(rest_s, 0, 0)}.items()
        ]


GYMGATE = ("gymgate --stock-servers", "gymgate")
OURS = ("SDK process", "daemon")
PROCESSES = ["process", "CPU ms per rollout", "KB per live rollout", "descriptors per live rollout"]
HEAD = [
    "contender",
    "wall / ideal",
    "added per rollout, median ms",
    "p99",
    "added per call, median ms",
    "p99",
    "CPU ms per rollout, all processes",
    "KB per live rollout, gymgate's processes",
    "failed",
]


def ideal_wall_s(plans: list[list[float]], workers: int) -> float:
    """Makespan of the plans, in order, on workers that take the next as they get free."""
    free = [0.0] * workers
    for plan in plans:
        heapq.heappush(free, heapq.heappop(free) + sum(plan))
    return max(free)


async def in_turn(
    rows: list[dict[str, Any]], workers: int, run: Callable[[int], Any], limit_s: float | None = None
) -> float:
    """Run every row, `workers` at once, or as many as end within the limit; seconds."""
    indices = iter(range(len(rows)))

    async def worker() -> None:
        for number in indices:
            await run(number)

    started = time.perf_counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*(worker() for _ in range(workers)))
    return time.perf_counter() - started


@contextlib.asynccontextmanager
async def told(level: Level) -> AsyncIterator[None]:
    """Say every ten seconds how far a level is."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(TOLD_S)
            say(f"  {level.name}, c={level.concurrency:,}: {level.ended:,} of {level.rollouts:,} ended")

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


async def through_bare(
    level: Level,
    rows: list[dict[str, Any]],
    plans: list[list[float]],
    url: str,
    session: aiohttp.ClientSession,
    limit_s: float,
) -> None:
    async def run(number: int) -> None:
        started = time.perf_counter()
        async with session.post(url, json=rows[number]) as response:
            await response.read()
            level.failed += response.status != 200
        level.rollout_added_s.append(time.perf_counter() - started - sum(plans[number]))

    before = _cpu(os.getpid())
    async with told(level):
        level.wall_s = await in_turn(rows, level.concurrency, run, limit_s)
    level.cpu_s = _cpu(os.getpid()) - before


async def through_gymgate(
    level: Level,
    rows: list[dict[str, Any]],
    plans: list[list[float]],
    policy: HTTPEndpoint,
    stack: Stack,
    limit_s: float,
) -> None:
    async def run(number: int) -> None:
        started = time.perf_counter()
        rollout = await stack.run(rows[number], policy=policy)
        level.rollout_added_s.append(time.perf_counter() - started - sum(plans[number]))
        if rollout.error is not None:
            level.failed += 1
            level.errors[f"{rollout.error.type}: {rollout.error.message[:300]}"] += 1
        pairs = zip(rollout.calls, plans[number], strict=False)
        level.call_added_s.extend(call.duration_s - seconds for call, seconds in pairs)

    status = await stack.status()
    servers = {
        name: server["pid"]
        for environment in status["environments"].values()
        for name, server in environment["servers"].items()
    }
    pids = dict(zip(OURS, (os.getpid(), status["pid"]), strict=True)) | servers
    before, cpu_before = {name: Usage.of(pid) for name, pid in pids.items()}, _cpu(os.getpid(), status["pid"])
    sampling = asyncio.ensure_future(_most_used(pids))
    async with told(level):
        level.wall_s = await in_turn(rows, level.concurrency, run, limit_s)
    sampling.cancel()
    for name, most in (await sampling).items():
        level.used[name] = most.since(before[name])
    level.cpu_s = _cpu(os.getpid(), status["pid"]) - cpu_before


async def _most_used(pids: Mapping[str, int]) -> dict[str, Usage]:
    """Return the most that each process was seen to use until this is cancelled."""
    most = {name: Usage(0, 0, 0) for name in pids}

    def sample() -> None:
        for name, pid in pids.items():
            most[name] = most[name].or_more(Usage.of(pid))

    try:
        while True:
            sample()
            await asyncio.sleep(SAMPLED_S)
    except asyncio.CancelledError:
        sample()
        return most


def _cpu(*roots: int) -> float:
    """Seconds of processes and all below them; those that ended meanwhile are left out."""
    return sum(map(cpu_s, {pid for root in roots for pid in (root, *descendants(root))}))


def _ms(seconds: list[float], percentile: int) -> str:
    if len(seconds) < 2:
        return "-"
    return f"{statistics.quantiles(seconds, n=100)[percentile - 1] * 1000:.0f}"


@dataclass
class Load:
    """The rollouts of one level, and how long they take at best."""

    concurrency: int
    plans: list[list[float]]
    ideal_s: float

    @classmethod
    def make(cls, concurrency: int, waves: int, answer_s: float | None) -> Load:
        randomness = random.Random(concurrency)
        plans = [
            make_plan(randomness) if answer_s is None else [0.0, answer_s] for _ in range(waves * concurrency)
        ]
        return cls(concurrency, plans, ideal_wall_s(plans, concurrency))

    def level(self, name: str) -> Level:
        return Level(name, self.concurrency, self.ideal_s, rollouts=len(self.plans))


async def measure(args: argparse.Namespace, url: str) -> list[Level]:
    """Every level in turn, bare first."""
    runtime = await asyncio.to_thread(ensure_runtime, RuntimeConfig())
    path = Catalog(runtime.site, runtime.version).find(ENVIRONMENT).data_file().path
    template = json.loads(path.read_text().splitlines()[0])
    policy = HTTPEndpoint(base_url=url, dialect="responses")
    loads = [Load.make(concurrency, args.waves, args.answer_s) for concurrency in args.concurrency]
    left_out = ["bare"] * args.without_bare + [GYMGATE[0]] * args.without_stock
    names = [name for name in ("bare", *GYMGATE) if name not in left_out]
    rollouts = sum(len(load.plans) for load in loads)
    steps = Steps(len(names) * rollouts, limit_s=len(names) * len(loads) * args.limit_s)
    levels = []
    async with (
        bare_agent(runtime, url) as agent,
        acquire(StackConfig(environments=(ENVIRONMENT,), stock_servers=True)) as stock,
        acquire(StackConfig(environments=(ENVIRONMENT,))) as lean,
        aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session,
    ):
        stacks = dict(zip(GYMGATE, (stock, lean), strict=True))
        for load in loads:
            rows = [row_with(plan, template) for plan in load.plans]
            for name in names:
                level = load.level(name)
                levels.append(level)
                count = (
                    f"{level.rollouts:,} rollouts, {load.concurrency:,} at once, ideally {load.ideal_s:.0f} s"
                )
                steps.begin(f"{name}: {count}", level.rollouts)
                if name == "bare":
                    await through_bare(level, rows, load.plans, agent, session, args.limit_s)
                else:
                    await through_gymgate(level, rows, load.plans, policy, stacks[name], args.limit_s)
    return levels


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=numbers)
    parser.add_argument("--waves", type=int, default=1, help="rollouts of a level over its concurrency")
    parser.add_argument(
        "--limit-s", type=float, default=100, help="of each contender at each level, beyond --answer-s"
    )
    parser.add_argument("--answer-s", type=float, help="seconds of each rollout's last call")
    parser.add_argument("--without-bare", action="store_true")
    parser.add_argument("--without-stock", action="store_true")
    args = parser.parse_args(argv)
    args.limit_s += args.answer_s or 0.0
    most = max_rollouts(
        FEW_FILES_PER_ROLLOUT if args.without_stock else FILES_PER_ROLLOUT
    )  # raises the limit, which the policy's process and the servers inherit
    args.concurrency = args.concurrency or (
        [64, 128, 512, 2048] if args.answer_s is None else [min(most, 10_000)]
    )
    print(describe("aiohttp"), flush=True)
    print(f"{most:,} rollouts fit at once ({os.sysconf('SC_OPEN_MAX'):,} open files)", flush=True)
    with delayed_policy() as url:
        levels = asyncio.run(measure(args, url))
    print_table(HEAD, [level.cells() for level in levels])
    print_table(PROCESSES, [row for level in levels if level.used for row in level.process_rows()])
    for level in levels:
        for error, count in level.errors.most_common(5):
            print(f"{count} x {error}")
        bound_s = level.ideal_s + level.cpu_s / (os.cpu_count() or 1)
        print(
            f"{level.name}, c={level.concurrency:,}: {level.rollouts - level.ended + level.failed} lost; {level.wall_s:.1f} s, "
            f"where the policy and all CPU time over {os.cpu_count()} cores are {bound_s:.1f} s"
        )


if __name__ == "__main__":
    main()
