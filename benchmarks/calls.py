"""Count what one rollout of `gymgate run` meets of gymgate: functions, files, the arrows between files, what is read twice.

    ./dev python -m benchmarks calls [--rollouts 5] [--names]

Runs one row of the example with a chat endpoint again and again, one rollout after another, with `-o DIR`. Each makes two model
calls and one tool call. Counts in the process of `gymgate run` (SDK) and in the stack's daemon with `sys.setprofile`, from the
start of one rollout to the start of the next, after two that warm both up, and prints the median of each figure:

functions   distinct functions, however often each runs
entered     those of them that are called from another file, or by the event loop
files       in which they stand
arrows      pairs of files of which one calls a function of the other
chain       the most functions of gymgate that wait for each other, up to the event loop
calls       of functions; each step of a coroutine counts
JSON        calls of the JSON library
twice       functions that got the very same object, with the same plain arguments, more than once

Both processes load the counter by a `sitecustomize` module on their PYTHONPATH, so a checkout of another commit can be counted
with this very file.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

COUNTS, INTERPRETER = "GYMGATE_BENCHMARK_CALLS", "GYMGATE_BENCHMARK_PREFIX"
ENVIRONMENT = "example_single_tool_call"
STARTS = {"Stack.run": "SDK", "LeaseHolder.run": "daemon"}
"""The functions with which a rollout begins in either process."""
WARM_UP = 2
MADE_BY_COMPILER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")
FIGURES = ("functions", "entered", "files", "arrows", "chain", "calls", "JSON", "twice")
LONG = 64
"""Characters of a text from which on reading it again counts."""
_SUSPENDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Window:
    """What one process calls during one rollout."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.json = self.chain = 0
        self.entered: set[str] = set()
        self.arrows: set[tuple[str, str]] = set()
        self.readings: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self.objects: dict[int, Any] = {}
        """Those that were read, kept so that no other one gets an address of theirs."""

    def add(self, frame: FrameType, name: str) -> None:
        """Count a call of one of gymgate's functions."""
        self.calls[name] += 1
        file = name.partition(":")[0]
        caller, depth = _callers(frame)
        self.chain = max(self.chain, depth)
        if caller != file:
            self.entered.add(name)
            if caller is not None:
                self.arrows.add((caller, file))
        code = frame.f_code
        if code.co_argcount and not code.co_flags & _SUSPENDS:
            arguments = [frame.f_locals.get(argument) for argument in code.co_varnames[: code.co_argcount]]
            if (read := next(filter(_is_content, arguments), None)) is not None:
                plain = [
                    value for value in arguments if isinstance(value, str | int | None) and value is not read
                ]
                self.objects[id(read)] = read
                self.readings[name, id(read), repr(plain)] += 1

    def result(self) -> dict[str, Any]:
        """Return the figures, and the names behind two of them."""
        twice = sorted({name for (name, *_), times in self.readings.items() if times > 1})
        figures = {
            "functions": len(self.calls),
            "entered": len(self.entered),
            "files": len({name.partition(":")[0] for name in self.calls}),
            "arrows": len(self.arrows),
            "chain": self.chain,
            "calls": sum(self.calls.values()),
            "JSON": self.json,
            "twice": len(twice),
        }
        return {"figures": figures, "calls": self.calls, "twice": twice}


class CallCounter:
    """The profile function of all threads of a process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.window: Window | None = None
        self.started = 0
        self.last: FrameType | None = None
        """The frame in which the rollout under way began; a coroutine's steps have the same one."""

    def install(self) -> None:
        sys.setprofile(self.count)
        threading.setprofile(self.count)

    def count(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            if self.window is not None and getattr(called, "__module__", None) == "orjson":
                self.window.json += 1
            return
        if event != "call" or (file := _file_in_gymgate(frame)) is None:
            return
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        if name in STARTS and frame is not self.last:
            self.last = frame
            self.begin(STARTS[name])
        if self.window is not None and not name.endswith(MADE_BY_COMPILER):
            self.window.add(frame, f"{file}:{name}")

    def begin(self, process: str) -> None:
        """Write what the rollout before met, and begin a new one."""
        if self.window is not None:
            path = self.directory / f"{process}-{self.started}.json"
            path.write_text(json.dumps(self.window.result()))
        self.started += 1
        self.window = Window()


def count_here() -> None:
    """Called by `sitecustomize` in every process of this interpreter."""
    CallCounter(Path(os.environ[COUNTS])).install()


def _file_in_gymgate(frame: FrameType) -> str | None:
    _, in_gymgate, module = frame.f_code.co_filename.rpartition("/gymgate/")
    return module if in_gymgate else None


def _callers(frame: FrameType) -> tuple[str | None, int]:
    """Return the file of gymgate that calls a function, if one does, and how many functions wait for each other."""
    caller, depth, before = None, 1, frame.f_back
    while before is not None and "/asyncio/" not in before.f_code.co_filename:
        if (file := _file_in_gymgate(before)) is not None:
            depth += 1
            caller = caller or file
        before = before.f_back
    return caller, depth


def _is_content(value: Any) -> bool:
    return isinstance(value, dict | list) or (isinstance(value, str | bytes) and len(value) >= LONG)


def count(url: str, rollouts: int, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return, for either process, what each rollout met."""
    hook = f"import os, sys\nif sys.prefix == os.environ.get({INTERPRETER!r}):\n"
    hook += f"    sys.path.append({str(Path(__file__).parent.parent)!r})\n"
    hook += "    from benchmarks.calls import count_here\n    count_here()\n"
    (directory / "sitecustomize.py").write_text(hook)
    environment = {COUNTS: str(directory), INTERPRETER: sys.prefix, "PYTHONPATH": str(directory)}
    repeats = WARM_UP + rollouts + 1  # the last one's end is not seen
    command = [sys.executable, "-m", "gymgate", "run", ENVIRONMENT, "-n", "1", "-r", str(repeats), "-c", "1"]
    command += ["-b", url, "-m", "scripted", "-o", str(directory / "run")]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks: gymgate run failed: {done.stderr[-1000:]}")
    numbers = range(WARM_UP + 1, WARM_UP + rollouts + 1)
    return {
        process: [json.loads((directory / f"{process}-{number}.json").read_text()) for number in numbers]
        for process in STARTS.values()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--names", action="store_true", help="list the functions of the last rollout")
    args = parser.parse_args(argv)
    from benchmarks.scripted_policy import scripted_policy

    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name, scripted_policy() as url:
        counted = count(url, args.rollouts, Path(name))
    print(f"{'process':8}", *(f"{figure:>9}" for figure in FIGURES))
    for process, windows in counted.items():
        medians = (statistics.median(window["figures"][figure] for window in windows) for figure in FIGURES)
        print(f"{process:8}", *(f"{median:9.0f}" for median in medians))
    both = {name for windows in counted.values() for name in windows[-1]["calls"]}
    print(f"{'both':8} {len(both):9} {'':9} {len({name.partition(':')[0] for name in both}):9}")
    for process, windows in counted.items() if args.names else ():
        calls, twice = windows[-1]["calls"], {*windows[-1]["twice"]}
        lines = (f"  {calls[name]:4} {name}{'  (twice)' * (name in twice)}" for name in sorted(calls))
        print(f"\n{process}", *lines, sep="\n")


if __name__ == "__main__":
    main()
