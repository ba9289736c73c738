"""Time to the first rollout, and memory: gymgate, NeMo Gym's own commands, verifiers' own taskset.

    ./dev python -m benchmarks startup [--environments 1,4,8] [--rounds 3] [--cold] [--builtin]

Warm: every virtual environment is there. gymgate: `acquire` to the first reward, in a process that has imported it,
and the wall time of a whole `gymgate run` of one rollout; `gym env start` and then `gym eval run` of one row, over
links to the same environment; `vf-eval` of verifiers' taskset, which starts one environment at a time. Cold (`--cold`)
is gymgate with an empty cache but a filled uv cache; memory is PSS of all processes once ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.contenders import memory_mb
from benchmarks.growth import ENVIRONMENTS
from benchmarks.gym_collector import stock_stack
from benchmarks.machine import describe, print_table
from benchmarks.scripted_policy import scripted_policy
from benchmarks.verifiers_ceiling import BUILTIN, measure
from gymgate.api import load_catalog
from gymgate.config import ReplayEndpoint, StackConfig
from gymgate.stack import Stack, acquire
from gymgate.stack.forkserver import descendants

Cells = dict[str, dict[int, list[float]]]
"""By figure and number of environments, one value a round."""

MACHINE_WIDE = """
import asyncio, json, sys, time
from gymgate.config import StackConfig
from gymgate.stack import acquire
async def main():
    started = time.perf_counter()
    async with acquire(StackConfig.model_validate_json(sys.argv[1])):
        print(time.perf_counter() - started)
asyncio.run(main())
"""


async def first_rollout(stack: Stack) -> None:
    """Play the first recorded rollout of the first environment."""
    environment = load_catalog().find(ENVIRONMENTS[0])
    row = json.loads(environment.data_file().path.read_text().splitlines()[0])
    replay = ReplayEndpoint(rollouts=tuple(str(file.path) for file in environment.recordings()))
    rollout = await stack.run(row, policy=replay, environment=ENVIRONMENTS[0])
    assert rollout.error is None, rollout.error


async def measure_stack(count: int, add: Callable[[str, int, float], None]) -> None:
    """A first and a second start in this process, then a machine-wide stack that another process finds warm."""
    for name in ("first", "again"):
        started = time.perf_counter()
        async with acquire(StackConfig(environments=ENVIRONMENTS[:count])) as stack:
            add(f"gymgate: ready, s ({name})", count, time.perf_counter() - started)
            await first_rollout(stack)
            add(f"gymgate: first rollout, s ({name})", count, time.perf_counter() - started)
            daemon = (await stack.status())["pid"]
            add("gymgate: memory, MB", count, await memory_mb(stack))
            add("gymgate: processes", count, 1 + len(descendants(daemon)))
    config = StackConfig(environments=ENVIRONMENTS[:count], share="machine", linger_s=60)
    async with acquire(config):
        command = [sys.executable, "-c", MACHINE_WIDE, config.model_dump_json()]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        add("gymgate: ready, s (another process, machine-wide)", count, float(done.stdout))


def measure_command(count: int, add: Callable[[str, int, float], None], **environ: str) -> None:
    """`gymgate run` of one row, as a user waits for it."""
    command = [sys.executable, "-m", "gymgate", "run", *ENVIRONMENTS[:count], "-n", "1", "-r", "1"]
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True, env=os.environ | environ, timeout=900)
    what = "cold" if environ else "warm"
    add(f"gymgate: `gymgate run`, wall s ({what})", count, time.perf_counter() - started)


def measure_stock(url: str, count: int, add: Callable[[str, int, float], None]) -> None:
    started = time.perf_counter()
    with stock_stack(url, environments=ENVIRONMENTS[:count]) as stock:
        add("NeMo Gym: ready, s", count, stock.start_s)
        stock.collect(5, 5)
        add("NeMo Gym: first rollouts (5), s", count, time.perf_counter() - started)
        add("NeMo Gym: memory, MB", count, stock.memory_mb)
        add("NeMo Gym: processes", count, stock.processes)


def run(args: argparse.Namespace, url: str) -> Cells:
    cells: Cells = {}

    def add(figure: str, count: int, value: float) -> None:
        cells.setdefault(figure, {}).setdefault(count, []).append(value)

    for _ in range(args.rounds):
        for count in args.environments:
            asyncio.run(measure_stack(count, add))
            measure_command(count, add)
            if not args.without_stock:
                measure_stock(url, count, add)
    if args.cold:
        with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name:
            measure_command(1, add, GYMGATE_CACHE=name)
    if args.builtin:
        rows = str(load_catalog().find(ENVIRONMENTS[0]).data_file().path)
        add(
            "verifiers' built-in: `vf-eval` of 1 rollout, wall s",
            1,
            measure([*BUILTIN, rows], url, 1, 1).wall_s,
        )
    return cells


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--environments", type=numbers, default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--builtin", action="store_true")
    parser.add_argument("--without-stock", action="store_true")
    args = parser.parse_args(argv)
    print(describe("aiohttp", "verifiers"), flush=True)
    with scripted_policy() as url:
        cells = run(args, url)
    table = [[name, *(_cell(found, count) for count in args.environments)] for name, found in cells.items()]
    print_table(["environments", *map(str, args.environments)], table)


def _cell(found: dict[int, list[float]], count: int) -> str:
    if count not in found:
        return "-"
    value: Any = statistics.median(found[count])
    return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.2f}"


if __name__ == "__main__":
    main()
