"""What `gymgate eval run` gains by starting the stack while verifiers is imported: wall time of the main job, in pairs.

    ./dev python -m benchmarks early-start [--pairs 10] [--rollouts 100] [--concurrency 20] [--python PATH]

A pair is the same warm eval of `example_session_state_mgmt` with replayed answers, in processes of their own, in turn: once
with the environment named by `--env`, so that the stack starts while verifiers is imported, and once by
`--env.taskset.env`, which only verifiers reads, so that it starts after the import. Which one is first alternates. One eval
before the pairs is not measured. `--python` is the interpreter of another virtual environment, such as one with another
verifiers.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.machine import describe, print_table
from benchmarks.progress import say

ENVIRONMENT = "example_session_state_mgmt"
EARLY, LATE = ("--env", ENVIRONMENT), ("--env.taskset.env", ENVIRONMENT)


def measure(python: str, arguments: tuple[str, ...], rollouts: int, concurrency: int) -> float:
    """Return the wall time of an eval in seconds. Raises `RuntimeError` if it fails."""
    with tempfile.TemporaryDirectory() as output:
        command = [
            *(python, "-m", "gymgate", "eval", "run", "-n", "1", "-r", str(rollouts), "-c", str(concurrency))
        ]
        started = time.monotonic()
        done = subprocess.run(
            [*command, "-o", output, *arguments], capture_output=True, text=True, timeout=600, check=False
        )
        wall_s = time.monotonic() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr[-2000:]}")
    return wall_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=20)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    version = "import verifiers; print(verifiers.__version__)"
    verifiers = subprocess.run([options.python, "-c", version], capture_output=True, text=True, check=True)
    print(f"{describe()}, verifiers {verifiers.stdout.strip()}", flush=True)
    how = (options.python, EARLY, options.rollouts, options.concurrency)
    say(f"warming up: {measure(*how):.1f} s")
    rows, ratios = [], []
    for pair in range(options.pairs):
        order = (EARLY, LATE) if pair % 2 else (LATE, EARLY)
        took = {
            which: measure(options.python, which, options.rollouts, options.concurrency) for which in order
        }
        ratios.append(took[EARLY] / took[LATE])
        rows.append([str(pair + 1), f"{took[EARLY]:.1f}", f"{took[LATE]:.1f}", f"{ratios[-1]:.2f}"])
        say(f"pair {pair + 1} of {options.pairs}: {took[EARLY]:.1f} s, {took[LATE]:.1f} s, {ratios[-1]:.2f}")
    print_table(["pair", "during the import, s", "after it, s", "ratio"], rows)
    print(f"median ratio: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
