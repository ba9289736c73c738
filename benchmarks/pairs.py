"""This checkout beside another commit's, pair by pair: has a change made starts, rollouts or imports slower?

    ./dev python -m benchmarks pairs CHECKOUT [--pairs 10] [--rollouts 300] [--concurrency 20] [--cache DIR]

CHECKOUT is a clone or worktree of the other commit in which `./dev python -V` made an environment. Each measurement is
a program of its own that uses only what both have: `import gymgate`, `acquire`, `Stack.run`. Which checkout is first
alternates. One pair is not counted. Then the ratios this / other of each pair are summed up by their median, and by the two
order statistics that hold the true median with at least 95% (by the binomial distribution; 10 pairs: second and ninth).

The policies answer at once: the scripted one by HTTP, in either dialect, and a callable in the measured process, whose GIL a
thread meanwhile takes for 50 ms at a time, as a trainer does. `eval` is a whole `gymgate eval run` of replayed answers. A
pair takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import describe, print_table
from benchmarks.progress import say
from benchmarks.scripted_policy import scripted_policy

ENVIRONMENT = "example_single_tool_call"
PROGRAM = """
import sys, time
began = time.perf_counter()
import gymgate
figures = {"import gymgate, s": time.perf_counter() - began}
def pss_mb():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:")) / 1024
figures["import gymgate, MB"] = pss_mb()
import asyncio, json, threading
from gymgate import HTTPEndpoint, StackConfig, acquire, open_rows  # what both checkouts have
url, rollouts, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rows = [row.data for row in open_rows("example_single_tool_call")]
sys.path.insert(0, sys.argv[4])
from benchmarks.scripted_policy import chat_answer
async def answer(body):
    return chat_answer(body)
async def rate(stack, policy, count):
    numbers = iter(range(count))
    async def worker():
        for number in numbers:
            rollout = await stack.run(rows[number % len(rows)], policy=policy, record_bodies=False)
            assert rollout.reward is not None, rollout.error
    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return count / (time.perf_counter() - began)
def hold(stop):
    while not stop.is_set():
        sum(range(3_000_000))
        time.sleep(0.005)
async def main():
    chat = HTTPEndpoint(base_url=url)
    began = time.perf_counter()
    async with acquire(StackConfig(environments=("example_single_tool_call",))) as stack:
        figures["ready, s"] = time.perf_counter() - began
        await stack.run(rows[0], policy=chat, record_bodies=False)
        figures["first rollout, s"] = time.perf_counter() - began
        await rate(stack, chat, 40)
        figures["rollouts/s, chat"] = await rate(stack, chat, rollouts)
        figures["rollouts/s, Responses"] = await rate(stack, HTTPEndpoint(base_url=url, dialect="responses"), rollouts)
        stop = threading.Event()
        holder = threading.Thread(target=hold, args=(stop,))
        holder.start()
        try:
            figures["rollouts/s, callable beside a held GIL"] = await rate(stack, answer, rollouts // 3)
        finally:
            stop.set()
            holder.join()
        figures["SDK process after it, MB"] = pss_mb()
asyncio.run(main())
print(json.dumps(figures))
"""


def python_of(checkout: Path) -> Path:
    """The interpreter that a checkout's `./dev` made; commits up to a13aa8f5 put it into `.venv`."""
    environments = (checkout / ".venv-dev", checkout / ".venv")
    return next((path for path in environments if path.exists()), environments[0]) / "bin/python"


def measure(checkout: Path, url: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one checkout. Raises `RuntimeError` if its program fails."""
    here = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if args.cache and checkout != here:
        environment["GYMGATE_CACHE"] = str(args.cache)
    python = str(python_of(checkout))
    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as output:
        settings = [url, str(args.rollouts), str(args.concurrency), str(checkout)]
        printed = _run([python, "-c", PROGRAM, *settings], environment)
        figures: dict[str, float] = json.loads(printed.splitlines()[-1])
        job = ["-n", "1", "-r", "100", "-c", "20", "-o", output]
        began = time.perf_counter()
        _run([python, "-m", "gymgate", "eval", "run", "--env", ENVIRONMENT, *job], environment)
        figures["eval run -r 100 -c 20, s"] = time.perf_counter() - began
    return figures


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
    return done.stdout


def interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the two values between which the true median lies with at least `confidence`; the extremes if they are few."""
    ordered, count = sorted(values), len(values)
    left = 0
    while (left + 1) * 2 < count and 2 * _below(left + 1, count) <= 1 - confidence:
        left += 1
    return ordered[left], ordered[count - 1 - left]


def _below(number: int, count: int) -> float:
    """Probability that at most `number` of `count` values are below the median."""
    return sum(math.comb(count, k) for k in range(number + 1)) / 2.0**count


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=20)
    parser.add_argument("--cache", type=Path, help="GYMGATE_CACHE of the other checkout")
    args = parser.parse_args(argv)
    here, other = Path(__file__).parents[1], args.checkout.resolve()
    if not python_of(other).exists():
        sys.exit(f"benchmarks: {other} has no environment; `./dev python -V` there makes it")
    print(describe(), flush=True)
    found: dict[str, list[tuple[float, float]]] = {}
    with scripted_policy() as url:
        for number in range(args.pairs + 1):
            order = (here, other) if number % 2 else (other, here)
            figures = {checkout: measure(checkout, url, args) for checkout in order}
            say(
                f"pair {number} of {args.pairs}, load {os.getloadavg()[0]:.1f}: {figures[here]} / {figures[other]}"
            )
            if number:
                for name, value in figures[here].items():
                    found.setdefault(name, []).append((value, figures[other][name]))
    rows = []
    for name, pairs in found.items():
        ratios = [a / b for a, b in pairs]
        low, high = interval(ratios)
        medians = [f"{statistics.median(column):.3g}" for column in zip(*pairs, strict=True)]
        rows.append([name, *medians, f"{statistics.median(ratios):.2f}", f"{low:.2f} to {high:.2f}"])
    print_table(["figure", "this", "other", "median ratio", "interval"], rows)


if __name__ == "__main__":
    main()
