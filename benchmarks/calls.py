"""Count what one rollout with a chat endpoint meets of gymgate: functions, their classes and files, and its JSON texts.

    ./dev python -m benchmarks calls [--rollouts 5] [--names]

Counts calls in the SDK's process and in the stack's daemon with `sys.setprofile`, after a rollout that warms both up, and
prints the median over the rollouts. A rollout of the example makes two model calls and one tool call. A function counts
once however often it runs; `calls` counts each time. The daemon loads the counter by a `sitecustomize` module on its
PYTHONPATH, so a checkout of another commit can be counted with this very file.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

COUNTS = "GYMGATE_BENCHMARK_CALLS"
ENVIRONMENT = "example_single_tool_call"
MADE_BY_COMPILER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")


class CallCounter:
    """What this process calls between `start` and `stop`; set as the profile function of all its threads."""

    def __init__(self) -> None:
        self.counting = False
        self.calls: collections.Counter[str] = collections.Counter()

    def install(self) -> None:
        sys.setprofile(self._count)
        threading.setprofile(self._count)

    def start(self, *_: object) -> None:
        self.calls.clear()
        self.counting = True

    def stop(self) -> dict[str, int]:
        self.counting = False
        return dict(self.calls)

    def _count(self, frame: FrameType, event: str, called: Any) -> None:
        if not self.counting:
            return
        if event == "c_call" and getattr(called, "__module__", None) == "orjson":
            self.calls[f"orjson.{called.__name__}"] += 1
        code = frame.f_code
        _, in_gymgate, module = code.co_filename.rpartition("/gymgate/")
        if event == "call" and in_gymgate and not code.co_name.endswith(MADE_BY_COMPILER):
            self.calls[f"{module}:{getattr(code, 'co_qualname', code.co_name)}"] += 1


def count_in_daemon() -> None:
    """Called by `sitecustomize` in the daemon: SIGUSR1 starts counting, SIGUSR2 writes what was counted."""
    counter, target = CallCounter(), Path(os.environ[COUNTS])

    def write(*_: object) -> None:
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(counter.stop()))
        partial.rename(target)

    def start(*_: object) -> None:
        counter.start()
        target.with_suffix(".started").touch()

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, write)
    counter.install()


def _await_file(path: Path) -> bytes:
    limit = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > limit:
            raise SystemExit(f"benchmarks: the daemon did not write {path.name} in 10 s")
        time.sleep(0.01)
    return path.read_bytes()


async def count(url: str, rollouts: int, counts: Path) -> list[dict[str, dict[str, int]]]:
    """Return, for each rollout, the calls of either process."""
    from gymgate import (
        HTTPEndpoint,
        StackConfig,
        acquire,
        open_rows,
    )  # what checkouts of other commits have, too

    row = next(iter(open_rows(ENVIRONMENT))).data
    policy, counter = HTTPEndpoint(base_url=url), CallCounter()
    found: list[dict[str, dict[str, int]]] = []
    async with acquire(StackConfig(environments=(ENVIRONMENT,))) as stack:
        pid = (await stack.status())["pid"]
        await stack.run(row, policy=policy)
        counter.install()
        for _ in range(rollouts):
            started = counts.with_suffix(".started")
            for path in (counts, started):
                path.unlink(missing_ok=True)
            os.kill(pid, signal.SIGUSR1)
            _await_file(started)
            counter.start()
            rollout = await stack.run(row, policy=policy)
            here = counter.stop()
            os.kill(pid, signal.SIGUSR2)
            assert rollout.reward is not None, rollout.error
            found.append({"SDK": here, "daemon": json.loads(_await_file(counts))})
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def _numbers(calls: dict[str, int]) -> tuple[int, int, int, int, int]:
    """Distinct functions, the classes and files they stand in, calls of them, and calls of the JSON library."""
    ours = {name: times for name, times in calls.items() if not name.startswith("orjson.")}
    parts = [name.partition(":") for name in ours]
    classes = {(file, name.split(".")[0]) for file, _, name in parts if re.match(r"_?[A-Z]", name)}
    calls_of_ours = sum(ours.values())
    return (
        len(ours),
        len(classes),
        len({file for file, *_ in parts}),
        calls_of_ours,
        sum(calls.values()) - calls_of_ours,
    )


def _line(process: str, figures: list[float]) -> str:
    return f"{process:8} " + " ".join(f"{n:{w}.0f}" for n, w in zip(figures, (9, 7, 5, 6, 5), strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--names", action="store_true", help="list the functions of the last rollout")
    args = parser.parse_args(argv)
    from benchmarks.scripted_policy import scripted_policy

    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name, scripted_policy() as url:
        hook = "import sys\nif 'gymgate.stack.daemon.process' in sys.orig_argv:\n"
        hook += f"    sys.path.append({str(Path(__file__).parent.parent)!r})\n"
        hook += "    from benchmarks.calls import count_in_daemon\n    count_in_daemon()\n"
        (Path(name) / "sitecustomize.py").write_text(hook)
        counts = Path(name) / "counts.json"
        os.environ |= {"PYTHONPATH": name, COUNTS: str(counts)}
        found = asyncio.run(count(url, args.rollouts, counts))
    print(f"{'process':8} {'functions':>9} {'classes':>7} {'files':>5} {'calls':>6} {'JSON':>5}")
    totals = [0.0] * 5
    for process in ("SDK", "daemon"):
        columns = zip(*(_numbers(rollout[process]) for rollout in found), strict=True)
        medians = [statistics.median(column) for column in columns]
        totals = [a + b for a, b in zip(totals, medians, strict=True)]
        print(_line(process, medians))
    print(_line("sum", totals))
    if args.names:
        for process, calls in found[-1].items():
            print(f"\n{process}", *(f"  {times:4} {name}" for name, times in sorted(calls.items())), sep="\n")


if __name__ == "__main__":
    main()
