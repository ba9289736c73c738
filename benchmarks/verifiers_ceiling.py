"""Rollouts per second through verifiers, side by side: its own ceiling, gymgate, and its built-in NeMo Gym taskset.

    ./dev python -m benchmarks verifiers [--rollouts 200] [--concurrency 1,20,64,256] [--rounds 1] [--builtin]

Every contender is one `vf-eval` over the same scripted policy: two chat calls per rollout. The rate is that of its
saved traces, first start to last end, so imports and server start are left out; they are in the wall time beside it.

The built-in taskset runs 20 rollouts once, at up to 20 at a time: it starts a server for each.

A round of all takes about a minute for each concurrency on two cores, the built-in taskset another; a run is given
half an hour at most.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.builtin import BUILTIN, BuiltinHome, eval_command, read_metrics
from benchmarks.machine import describe, numbers
from benchmarks.progress import Steps
from benchmarks.scripted_policy import scripted_policy
from gymgate.gym.runtime import open_catalog

ENVIRONMENT = "example_single_tool_call"


class Figure(NamedTuple):
    """One run of one contender."""

    rate: float
    """Rollouts per second."""
    wall_s: float
    failed: int


CONTENDERS = {
    "empty harness, openai client": ["empty-harness"],
    "empty harness, bare aiohttp": ["empty-harness", "--env.taskset.client", "aiohttp"],
    "gymgate, chat": ["nemo-gym-env", "--env.taskset.env", ENVIRONMENT, "-n", "1"],
    "gymgate, responses": [
        *("nemo-gym-env", "--env.taskset.env", ENVIRONMENT, "-n", "1"),
        *("--env.taskset.dialect", "responses"),
    ],
}


def measure(
    arguments: list[str], base_url: str, rollouts: int, concurrency: int, environment: Mapping[str, str]
) -> Figure:
    """Run one `vf-eval` in a process of its own. Raises `RuntimeError` if it fails."""
    with tempfile.TemporaryDirectory() as output:
        started = time.monotonic()
        done = subprocess.run(
            eval_command(arguments, base_url, rollouts, concurrency, output),
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments[0]} failed: {done.stderr[-2000:]}")
        wall_s = time.monotonic() - started
        counts, rate = read_metrics(Path(output) / "run")
    return Figure(rate.per_s or 0.0, wall_s, counts.failed)


def measure_builtin(base_url: str, concurrency: int) -> Figure:
    """Verifiers' own taskset, in a home of its own."""
    rows = str(open_catalog().find(ENVIRONMENT).data_file().path)
    with contextlib.closing(BuiltinHome()) as home:
        return measure([*BUILTIN, rows], base_url, 20, concurrency, home.environment)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--concurrency", type=numbers, default=[1, 20, 64, 256])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--builtin", action="store_true", help="also verifiers' own taskset, 20 rollouts, once"
    )
    options = parser.parse_args()
    print(describe("verifiers", "openai"), flush=True)
    builtin = [c for c in options.concurrency if c <= 20] if options.builtin else []
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    steps = Steps(options.rounds * len(CONTENDERS) * len(options.concurrency) + 5 * len(builtin))
    with scripted_policy() as base_url:
        for concurrency in options.concurrency:
            figures: dict[str, list[Figure]] = {name: [] for name in CONTENDERS}
            for number in range(options.rounds):
                for name, arguments in CONTENDERS.items():
                    steps.begin(f"c={concurrency}, round {number + 1} of {options.rounds}: {name}")
                    figure = measure(arguments, base_url, options.rollouts, concurrency, environment)
                    figures[name].append(figure)
            if concurrency in builtin:
                steps.begin(f"c={concurrency}: verifiers' built-in taskset", 5)
                try:
                    figures["verifiers' built-in"] = [measure_builtin(base_url, concurrency)]
                except RuntimeError as error:
                    print(str(error)[-400:], file=sys.stderr)
            report(figures, concurrency)


def report(figures: dict[str, list[Figure]], concurrency: int) -> None:
    """Medians, spread, and the share of the ceiling."""
    ceiling = statistics.median(figure.rate for figure in next(iter(figures.values())))
    print(f"{f'c={concurrency}':30}{'rollouts/s':>12}{'runs':>24}{'of ceiling':>12}{'wall':>8}{'failed':>8}")
    for name, runs in figures.items():
        rate = statistics.median(run.rate for run in runs)
        each = " ".join(f"{run.rate:.1f}" for run in runs)
        wall = statistics.median(run.wall_s for run in runs)
        failed = sum(run.failed for run in runs)
        print(f"{name:30}{rate:12.1f}{each:>24}{rate / ceiling:12.0%}{wall:7.1f}s{failed:8}", flush=True)


if __name__ == "__main__":
    main()
