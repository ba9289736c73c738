"""Programs that run to their end with all they start: wall time, peak memory and processes, a deadline, nothing left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from benchmarks.machine import descendants, pss_mb, stat_fields

SAMPLE_S = 0.5
GRACE_S = 20.0
"""From SIGTERM to SIGKILL."""


class Trees:
    """Programs started by `run`, and everything seen below them.

    Sampled every half second: `peak_mb` is the most PSS that all had together, `programs_mb` what of it was in the
    programs themselves, `processes` the most that ran at once. `wall_s`: from a run's begin to its last program's end, of
    all runs.
    """

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.peak_mb = 0.0
        self.programs_mb = 0.0
        self.processes = 0
        self._programs: list[subprocess.Popen[bytes]] = []
        self._seen: dict[int, str] = {}

    def run(
        self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], deadline: float
    ) -> list[str]:
        """Run them at once; the end of what each printed, or "" for one that succeeded. `deadline` is of `time.monotonic()`.

        Raises TimeoutError at the deadline. However it ends, no process that was seen is left.
        """
        with contextlib.ExitStack() as stack:
            sinks: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
            stack.callback(self._end)
            started = time.monotonic()
            for command, sink in zip(commands, sinks, strict=True):
                self._programs.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=sink,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            while any(program.poll() is None for program in self._programs):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(self._running())} of {len(commands)} programs still ran")
                self._sample()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._running_or_last().wait(SAMPLE_S)
            self.wall_s += time.monotonic() - started
            ended = zip(self._programs, sinks, strict=True)
            return [_tail(sink) if program.returncode else "" for program, sink in ended]

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [program for program in self._programs if program.returncode is None]

    def _running_or_last(self) -> subprocess.Popen[bytes]:
        return next(iter(self._running()), self._programs[-1])

    def _sample(self) -> None:
        programs = [program.pid for program in self._running()]
        found = set(programs)
        for program in programs:
            found.update(descendants(program))
        for pid in found - self._seen.keys():
            if started := _start_time(pid):
                self._seen[pid] = started
        sizes = {pid: pss_mb(pid) for pid in found}
        self.processes = max(self.processes, len(sizes))
        if sum(sizes.values()) > self.peak_mb:
            self.peak_mb = sum(sizes.values())
            self.programs_mb = sum(sizes[pid] for pid in programs)

    def _end(self) -> None:
        """SIGTERM to the programs, which end their own; after a grace, SIGKILL to all that is left of what was seen."""
        self._sample()
        for program in self._running():
            program.terminate()
        deadline = time.monotonic() + GRACE_S
        while self._left() and time.monotonic() < deadline:
            self._sample()
            for program in self._programs:
                program.poll()
            time.sleep(0.1)
        deadline = time.monotonic() + GRACE_S
        while left := self._left():
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {left} outlived SIGKILL by {GRACE_S:.0f} s")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for program in self._programs:
                program.poll()
            time.sleep(0.1)
        self._programs = []

    def _left(self) -> list[int]:
        alive = [pid for pid, started in self._seen.items() if _start_time(pid) == started]
        return list(dict.fromkeys(each for pid in alive for each in (pid, *descendants(pid))))


def _start_time(pid: int) -> str:
    """Tells a process from a later one of the same number; "" if it is gone or only waits to be reaped."""
    fields = stat_fields(pid)
    return "" if not fields or fields[0] == "Z" else fields[19]


def _tail(sink: IO[bytes]) -> str:
    sink.seek(0)
    return sink.read().decode(errors="replace")[-2000:] or "it printed nothing"
