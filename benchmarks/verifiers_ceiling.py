"""Rollouts per second through verifiers, side by side: its own ceiling, gymgate, and its built-in NeMo Gym taskset.

    ./dev python -m benchmarks verifiers [--rollouts 200] [--concurrency 20] [--rounds 3] [--builtin]

Every contender is one `vf-eval` over the same scripted policy: two chat calls per rollout. The rate is that of its
saved traces, first start to last end, so imports and server start are left out; they are in the wall time beside it.

A round of all takes about a minute on two cores, the built-in taskset another; a run is given half an hour at most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import describe
from benchmarks.progress import Steps
from benchmarks.scripted_policy import scripted_policy
from gymgate.api import load_catalog
from gymgate.cli.eval_report import read_tallies

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
BUILTIN = [
    *("builtin-nemo-gym", "-n", "1", "--env.agent.runtime.type", "subprocess"),
    *("--env.agent.harness.id", "null", "--env.taskset.dataset"),
]


def eval_command(
    arguments: list[str], base_url: str, rollouts: int, concurrency: int, output: str
) -> list[str]:
    """One `vf-eval`, its traces in `output`/run; for PYTHONPATH it needs the directory of this file."""
    return [
        *(sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()"),
        *arguments,
        *("-r", str(rollouts), "-c", str(concurrency), "-m", "scripted", "-o", output, "--run.name", "run"),
        *("--client.base-url", base_url, "--client.api-key-var", "NO_KEY", "--no-push", "--no-rich"),
    ]


def measure(arguments: list[str], base_url: str, rollouts: int, concurrency: int) -> Figure:
    """Run one `vf-eval` in a process of its own."""
    with tempfile.TemporaryDirectory() as output:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
        started = time.monotonic()
        done = subprocess.run(
            eval_command(arguments, base_url, rollouts, concurrency, output),
            check=False,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            raise SystemExit(f"{arguments[0]} failed: {done.stderr[-2000:]}")
        wall_s = time.monotonic() - started
        (tally,) = read_tallies(Path(output) / "run").values()
    return Figure(tally.rate or 0.0, wall_s, tally.failed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--builtin", action="store_true", help="also verifiers' own taskset, 20 rollouts, once"
    )
    options = parser.parse_args()
    figures: dict[str, list[Figure]] = {name: [] for name in CONTENDERS}
    print(describe("verifiers", "openai"), flush=True)
    steps = Steps(options.rounds * len(CONTENDERS) + 5 * options.builtin)
    with scripted_policy() as base_url:
        for number in range(options.rounds):
            for name, arguments in CONTENDERS.items():
                steps.begin(f"round {number + 1} of {options.rounds}: {name}")
                figures[name].append(measure(arguments, base_url, options.rollouts, options.concurrency))
        if options.builtin:
            steps.begin("verifiers' built-in taskset", 5)
            rows = str(load_catalog().find(ENVIRONMENT).data_file().path)
            figures["verifiers' built-in"] = [measure([*BUILTIN, rows], base_url, 20, options.concurrency)]
    report(figures)


def report(figures: dict[str, list[Figure]]) -> None:
    """Medians, spread, and the share of the ceiling."""
    ceiling = statistics.median(figure.rate for figure in next(iter(figures.values())))
    print(f"{'':30}{'rollouts/s':>12}{'runs':>24}{'of ceiling':>12}{'wall':>8}{'failed':>8}")
    for name, runs in figures.items():
        rate = statistics.median(run.rate for run in runs)
        each = " ".join(f"{run.rate:.1f}" for run in runs)
        wall = statistics.median(run.wall_s for run in runs)
        failed = sum(run.failed for run in runs)
        print(f"{name:30}{rate:12.1f}{each:>24}{rate / ceiling:12.0%}{wall:7.1f}s{failed:8}")


if __name__ == "__main__":
    main()
