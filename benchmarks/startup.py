"""Time to the first rollout, and memory: gymgate, NeMo Gym's own commands, verifiers' own taskset.

    ./dev python -m benchmarks startup [--environments 1,4,8] [--rounds 1] [--only gymgate,stock,builtin] [--cold]
                                       [--limit-s 900]

Warm: every virtual environment is there. gymgate: `acquire` to the first reward, in a process that has imported it,
and the wall time of a whole `gymgate run` of one rollout per environment. stock: `gym env start` and then `gym eval run` of
five rows of the first environment, over links to gymgate's runtime. builtin: one `vf-eval` of one rollout per environment,
for it takes one environment; from the first one's start until the last environment's rollout is scored, one after another
(so one environment is up at a time) and, for several, all at once. It runs nemo-gym 0.4.0's resources servers without a Gym
agent; a first, unmeasured one makes its virtual environments. Memory is PSS: of gymgate's and stock's processes once ready;
of `gymgate run` and builtin, sampled every half second, the most that everything they started had together, they themselves
included. What `vf-eval` itself had of it is also shown alone. verifiers gives a resources server 60 tries, half a second
apart, to start; many at once on few cores can miss that, and then the row says that it failed.

Cold (`--cold`, instead of warm): no virtual environment is there. `gymgate run` with an empty GYMGATE_CACHE makes one,
`gym env start`, which is installed itself, one for each kind of server, and the first `vf-eval` one for verifiers' script of
the resources server and one for its harness; the others of the same row find them. All use the user's uv cache; how many MB
it grew by, which is what had to be downloaded and unpacked while the clock ran, stands beside them: run it a second time for
a start without downloads.

A step that is not done within `--limit-s` seconds is ended and its row says so, or that it failed; the others go on. Steps,
for each number of environments: gymgate in this process, `gymgate run`, `gym env start` (its `gym eval run` has 5 minutes of
its own), each order of builtin. Each figure is on stderr as soon as it is there.

Warm, a round of 1, 4 and 8 environments takes on two cores about 2 minutes for gymgate, 5 for stock and 10 to 15 for builtin.
Cold, a start of one environment takes about 1 minute with gymgate, 3 with stock and 1 with builtin, without downloads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.builtin import SERVERS, BuiltinHome, Order, start_builtin
from benchmarks.contenders import memory_mb
from benchmarks.gym_collector import stock_stack, uv_cache
from benchmarks.machine import descendants, describe, numbers, print_table
from benchmarks.progress import Steps, say
from benchmarks.scripted_policy import scripted_policy
from benchmarks.trees import Trees
from gymgate.core.config import ReplayEndpoint, StackConfig
from gymgate.gym.runtime import open_catalog
from gymgate.stack import Stack, acquire

Add = Callable[[str, int, float], None]
ENVIRONMENTS = tuple(SERVERS)
"""Those that every contender can start."""
ORDERS: tuple[Order, ...] = ("one after another", "all at once")

EXPECTED_S = {"gymgate": (25, 5), "stock": (50, 10), "builtin": (0, 80)}
"""Seconds of a warm round on two cores, and for each environment, for the estimate of what is left."""

MACHINE_WIDE = """
import asyncio, json, sys, time
from gymgate.core.config import StackConfig
from gymgate.stack import acquire
async def main():
    started = time.perf_counter()
    async with acquire(StackConfig.model_validate_json(sys.argv[1])):
        print(time.perf_counter() - started)
asyncio.run(main())
"""


class Figures:
    """Values by figure and number of environments, one a round; in place of one that there is not, why."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, list[float]]] = {}
        self._missed: dict[tuple[str, int], str] = {}

    def add(self, figure: str, count: int, value: float) -> None:
        self._values.setdefault(figure, {}).setdefault(count, []).append(value)
        say(f"  {figure}, environments: {count}: {value:,.2f}")

    @contextlib.contextmanager
    def attempt(self, figure: str, count: int, limit_s: float) -> Iterator[None]:
        """The block measures it and ends itself at the limit; if it raises, that is what its row says."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            took_s = time.perf_counter() - started
            late = took_s > limit_s - 1
            note = f"not done in {limit_s:.0f} s" if late else f"failed after {took_s:.0f} s"
            self._values.setdefault(figure, {})
            self._missed[figure, count] = note
            say(f"  {figure}, environments: {count}: {note}: {type(error).__name__}: {error}")

    def print_table(self, counts: list[int]) -> None:
        rows = [[figure, *(self._cell(figure, count) for count in counts)] for figure in self._values]
        print_table(["environments", *map(str, counts)], rows)

    def _cell(self, figure: str, count: int) -> str:
        missed = self._missed.get((figure, count), "")
        found = self._values[figure].get(count)
        if not found:
            return missed or "-"
        value: Any = statistics.median(found)
        text = f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.2f}"
        return f"{text} ({missed})" if missed else text


async def first_rollout(stack: Stack) -> None:
    """Play the first recorded rollout of the first environment."""
    environment = open_catalog().find(ENVIRONMENTS[0])
    row = json.loads(environment.data_file().path.read_text().splitlines()[0])
    replay = ReplayEndpoint(rollouts=tuple(str(file.path) for file in environment.recordings()))
    rollout = await stack.run(row, policy=replay, environment=ENVIRONMENTS[0])
    assert rollout.error is None, rollout.error


async def measure_stack(count: int, add: Add, limit_s: float) -> None:
    """A first and a second start in this process, then a machine-wide stack that another process finds warm."""
    async with asyncio.timeout(limit_s):
        for name in ("first", "again"):
            started = time.perf_counter()
            async with acquire(StackConfig(environments=ENVIRONMENTS[:count])) as stack:
                add(f"gymgate: ready, s ({name})", count, time.perf_counter() - started)
                await first_rollout(stack)
                add(f"gymgate: first rollout, s ({name})", count, time.perf_counter() - started)
                daemon = (await stack.status())["pid"]
                add("gymgate: memory, MB", count, await memory_mb(stack))
                add("gymgate: processes", count, 1 + len(descendants(daemon)))
        config = StackConfig(environments=ENVIRONMENTS[:count], share="machine")
        async with acquire(config):
            command = [sys.executable, "-c", MACHINE_WIDE, config.model_dump_json()]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=True, timeout=60
            )
            add("gymgate: ready, s (another process, machine-wide)", count, float(done.stdout))


def measure_command(count: int, add: Add, environment: Mapping[str, str], limit_s: float) -> None:
    """`gymgate run` of one row of each, as a user waits for it."""
    command = [sys.executable, "-m", "gymgate", "run", *ENVIRONMENTS[:count], "-n", "1", "-r", "1"]
    trees = Trees()
    (failure,) = trees.run([command], environment, time.monotonic() + limit_s)
    if failure:
        raise RuntimeError(failure)
    add("gymgate: `gymgate run`, wall s", count, trees.wall_s)
    add("gymgate: `gymgate run`, memory, MB", count, trees.peak_mb)


def measure_stock(url: str, count: int, add: Add, limit_s: float, *, cold: bool = False) -> None:
    started = time.perf_counter()
    with stock_stack(url, timeout_s=limit_s, environments=ENVIRONMENTS[:count], cold=cold) as stock:
        add("NeMo Gym: ready, s", count, stock.start_s)
        stock.collect(5, 5)
        add("NeMo Gym: first rollouts (5), s", count, time.perf_counter() - started)
        add("NeMo Gym: memory, MB", count, stock.memory_mb)
        add("NeMo Gym: processes", count, stock.processes)


def measure_builtin(home: BuiltinHome, url: str, count: int, order: Order, add: Add, limit_s: float) -> None:
    start = start_builtin(home, url, ENVIRONMENTS[:count], order, limit_s)
    name = f"verifiers' built-in, {order}"
    add(f"{name}: a rollout of each, s", count, start.first_s)
    add(f"{name}: wall s", count, start.wall_s)
    add(f"{name}: memory, MB", count, start.peak_mb)
    add(f"{name}: memory of `vf-eval` alone, MB", count, start.programs_mb)
    add(f"{name}: processes", count, start.processes)


def measure_warm(args: argparse.Namespace, url: str, figures: Figures, steps: Steps) -> None:
    """Rounds in which the contenders take turns."""
    limit_s = args.limit_s
    with contextlib.closing(BuiltinHome()) as home:
        if "builtin" in args.only:
            steps.begin("verifiers' built-in taskset makes its virtual environments", 80)
            with figures.attempt("verifiers' built-in, virtual environments", 1, limit_s):
                start_builtin(home, url, ENVIRONMENTS[:1], "one after another", limit_s)
        for number, count in itertools.product(range(args.rounds), args.environments):
            which = f"round {number + 1} of {args.rounds}, environments: {count}"
            if "gymgate" in args.only:
                steps.begin(f"{which}, gymgate", expected_s("gymgate", count))
                with figures.attempt("gymgate: ready, s (first)", count, limit_s):
                    asyncio.run(measure_stack(count, figures.add, limit_s))
                with figures.attempt("gymgate: `gymgate run`, wall s", count, limit_s):
                    measure_command(count, figures.add, os.environ, limit_s)
            if "stock" in args.only:
                steps.begin(f"{which}, `gym env start`", expected_s("stock", count))
                with figures.attempt("NeMo Gym: ready, s", count, limit_s):
                    measure_stock(url, count, figures.add, limit_s)
            if "builtin" in args.only:
                steps.begin(f"{which}, verifiers' built-in taskset", expected_s("builtin", count))
                for order in ORDERS if count > 1 else ORDERS[:1]:
                    with figures.attempt(
                        f"verifiers' built-in, {order}: a rollout of each, s", count, limit_s
                    ):
                        measure_builtin(home, url, count, order, figures.add, limit_s)


def measure_cold(args: argparse.Namespace, url: str, figures: Figures, steps: Steps) -> None:
    """The same without a virtual environment."""
    limit_s = args.limit_s
    for _, count in itertools.product(range(args.rounds), args.environments):
        if "gymgate" in args.only:
            steps.begin(f"cold `gymgate run`, environments: {count}", expected_s("gymgate", count))
            with (
                downloads(figures, "gymgate", count),
                figures.attempt("gymgate: `gymgate run`, wall s", count, limit_s),
                tempfile.TemporaryDirectory(prefix="gymgate-bench-", ignore_cleanup_errors=True) as name,
            ):
                measure_command(count, figures.add, os.environ | {"GYMGATE_CACHE": name}, limit_s)
        if "stock" in args.only:
            steps.begin(f"cold `gym env start`, environments: {count}", expected_s("stock", count))
            with (
                downloads(figures, "NeMo Gym", count),
                figures.attempt("NeMo Gym: ready, s", count, limit_s),
            ):
                measure_stock(url, count, figures.add, limit_s, cold=True)
        if "builtin" in args.only:
            steps.begin(f"cold `vf-eval`, environments: {count}", expected_s("builtin", count))
            order = ORDERS[0]
            with (
                downloads(figures, "verifiers' built-in", count),
                figures.attempt(f"verifiers' built-in, {order}: a rollout of each, s", count, limit_s),
                contextlib.closing(BuiltinHome()) as home,
            ):
                measure_builtin(home, url, count, order, figures.add, limit_s)


@contextlib.contextmanager
def downloads(figures: Figures, contender: str, count: int) -> Iterator[None]:
    """What uv's cache grew by in the block, however it ended: the packages newly unpacked in it."""
    before = unpacked()
    try:
        yield
    finally:
        grown = sum(directory_mb(path) for path in unpacked() - before)
        figures.add(f"{contender}: uv's cache grew by, MB", count, grown)


def unpacked() -> set[Path]:
    """A directory for each package; to size all of a large cache takes longer than a start."""
    return set(uv_cache().glob("archive-*/*"))


def directory_mb(path: Path) -> float:
    """Of files, each counted once however often it is linked."""
    sizes: dict[int, int] = {}
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = (Path(directory) / name).lstat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values()) / 2**20


def expected_s(contender: str, count: int) -> float:
    start_s, each_s = EXPECTED_S[contender]
    return start_s + each_s * count


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=_counts, default=[1, 4, 8], help="of 1 to 8")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", type=_contenders, default=list(EXPECTED_S), metavar="CONTENDER,...")
    parser.add_argument(
        "--cold", action="store_true", help="without virtual environments, instead of with them"
    )
    parser.add_argument("--limit-s", type=float, default=900, help="of one contender and count")
    args = parser.parse_args(argv)
    print(describe("aiohttp", "verifiers"), flush=True)
    figures = Figures()
    expected = sum(expected_s(contender, count) for contender in args.only for count in args.environments)
    steps = Steps(args.rounds * expected + 80 * ("builtin" in args.only and not args.cold))
    try:
        with scripted_policy() as url:
            (measure_cold if args.cold else measure_warm)(args, url, figures, steps)
    finally:
        figures.print_table(args.environments)


def _counts(text: str) -> list[int]:
    counts = numbers(text)
    if not all(1 <= count <= len(ENVIRONMENTS) for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r}: each must be 1 to {len(ENVIRONMENTS)}")
    return counts


def _contenders(text: str) -> list[str]:
    if unknown := set(text.split(",")) - EXPECTED_S.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(EXPECTED_S)}")
    return text.split(",")


if __name__ == "__main__":
    main()
