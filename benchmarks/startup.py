"""Time to the first rollout, and memory: gymgate, NeMo Gym's own commands, verifiers' own taskset.

    ./dev python -m benchmarks startup [--environments 1,4,8] [--rounds 3] [--cold] [--builtin]

Warm: every virtual environment is there. gymgate: `acquire` to the first reward, in a process that has imported it,
and the wall time of a whole `gymgate run` of one rollout per environment; `gym env start` and then `gym eval run` of five
rows, over links to the same environment; `vf-eval` of verifiers' taskset, which starts one environment at a time. Memory is
PSS of all processes once ready.

Cold (`--cold`, instead of warm): no virtual environment is there. `gymgate run` with an empty GYMGATE_CACHE makes one, and
`gym env start`, which is installed itself, one for each kind of server. Both use the user's uv cache; how many MB it grew
by, which is what had to be downloaded and unpacked while the clock ran, stands beside them: run it a second time for a
start without downloads.

Warm, a round takes about 45 s for one environment and 2 minutes for eight, on two cores; cold, about 4 minutes for four.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders import memory_mb
from benchmarks.growth import ENVIRONMENTS
from benchmarks.gym_collector import stock_stack, uv_cache
from benchmarks.machine import describe, print_table
from benchmarks.progress import Steps, say
from benchmarks.scripted_policy import scripted_policy
from benchmarks.verifiers_ceiling import BUILTIN, measure
from gymgate.api import load_catalog
from gymgate.config import ReplayEndpoint, StackConfig
from gymgate.stack import Stack, acquire
from gymgate.stack.forkserver import descendants

Cells = dict[str, dict[int, list[float]]]
"""By figure and number of environments, one value a round."""

Add = Callable[[str, int, float], None]
COLD_TIMEOUT_S = 900

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


async def measure_stack(count: int, add: Add) -> None:
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


def measure_command(count: int, add: Add) -> None:
    """`gymgate run` of one row of each, as a user waits for it."""
    add("gymgate: `gymgate run`, wall s", count, run_command(count, os.environ))


def run_command(count: int, environment: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "gymgate", "run", *ENVIRONMENTS[:count], "-n", "1", "-r", "1"]
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True, env=environment, timeout=COLD_TIMEOUT_S)
    return time.perf_counter() - started


def measure_stock(url: str, count: int, add: Add, *, cold: bool = False) -> None:
    started = time.perf_counter()
    try:
        with stock_stack(url, environments=ENVIRONMENTS[:count], cold=cold) as stock:
            add("NeMo Gym: ready, s", count, stock.start_s)
            stock.collect(5, 5)
            add("NeMo Gym: first rollouts (5), s", count, time.perf_counter() - started)
            add("NeMo Gym: memory, MB", count, stock.memory_mb)
            add("NeMo Gym: processes", count, stock.processes)
    except (RuntimeError, subprocess.SubprocessError) as error:
        say(f"left out after {time.perf_counter() - started:.0f} s: {error}")


def measure_cold(url: str, count: int, add: Add, steps: Steps, *, stock: bool) -> None:
    """Both without a virtual environment; what uv's cache grows by tells what had to be downloaded."""
    steps.begin(f"cold `gymgate run`, environments: {count}", count)
    before = directory_mb(uv_cache())
    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name:
        add("gymgate: `gymgate run`, wall s", count, run_command(count, os.environ | {"GYMGATE_CACHE": name}))
    after = directory_mb(uv_cache())
    add("gymgate: uv's cache grew by, MB", count, after - before)
    if stock:
        steps.begin(f"cold `gym env start`, environments: {count}", 4 * count)
        measure_stock(url, count, add, cold=True)
        add("NeMo Gym: uv's cache grew by, MB", count, directory_mb(uv_cache()) - after)


def directory_mb(path: Path) -> float:
    """Of files, each counted once however often it is linked."""
    sizes: dict[int, int] = {}
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = (Path(directory) / name).lstat()
                sizes[status.st_ino] = status.st_size
    return float(round(sum(sizes.values()) / 2**20))


def run(args: argparse.Namespace, url: str) -> Cells:
    cells: Cells = {}

    def add(figure: str, count: int, value: float) -> None:
        cells.setdefault(figure, {}).setdefault(count, []).append(value)

    steps = Steps(args.rounds * sum(args.environments) * (1 if args.without_stock else 5) + 10 * args.builtin)
    for number in range(args.rounds):
        for count in args.environments:
            if args.cold:
                measure_cold(url, count, add, steps, stock=not args.without_stock)
                continue
            which = f"round {number + 1} of {args.rounds}, environments: {count}"
            steps.begin(f"{which}, gymgate", count)
            asyncio.run(measure_stack(count, add))
            measure_command(count, add)
            if not args.without_stock:
                steps.begin(f"{which}, `gym env start`", 4 * count)
                measure_stock(url, count, add)
    if args.builtin:
        steps.begin("verifiers' built-in taskset", 10)
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
    parser.add_argument(
        "--cold", action="store_true", help="without virtual environments, instead of with them"
    )
    parser.add_argument("--builtin", action="store_true", help="also verifiers' own taskset, once")
    parser.add_argument("--without-stock", action="store_true", help="leave NeMo Gym's own commands out")
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
