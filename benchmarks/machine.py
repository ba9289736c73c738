"""What a figure needs beside it: the machine, the versions, and the memory of a set of processes (Linux)."""

from __future__ import annotations

import os
import platform
import re
import socket
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path


def free_port() -> int:
    """A loopback port that was free a moment ago; only for programs that cannot bind port 0 themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def stat_fields(pid: int) -> list[str]:
    """/proc/<pid>/stat from its third field on; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def session_pids(session: int) -> list[int]:
    """Processes of a session, by /proc/<pid>/stat (field 6)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = stat_fields(int(entry.name))
        if fields and int(fields[3]) == session:
            found.append(int(entry.name))
    return found


def descendants(root: int) -> list[int]:
    """Processes below another one, by /proc/<pid>/stat (field 4)."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    below = {root}
    while below := {pid for pid, parent in parents.items() if parent in below}:
        found += below
    return found


def pss_mb(pid: int) -> float:
    """Proportional set size of a process in MB; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) / 1024  # type: ignore[index]


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used (fields 14 and 15 of its stat); 0 if it is gone."""
    if not (fields := stat_fields(pid)):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Processors:
    """Processor time by kind of process: all below this one, each found by its command."""

    KINDS = ("caller", "daemon", "NeMo Gym's servers", "policy")

    def __init__(self) -> None:
        self._before = self._now()

    def since(self) -> dict[str, float]:
        now = self._now()
        return {kind: now[kind] - self._before.get(kind, 0.0) for kind in now}

    def _now(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for pid in (os.getpid(), *descendants(os.getpid())):
            found[self._kind(pid)] += cpu_s(pid)
        return found

    def _kind(self, pid: int) -> str:
        if pid == os.getpid():
            return "caller"
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return "gone"
        if b"gymgate.stack.daemon" in command:
            return "daemon"
        return "policy" if b"benchmarks." in command else "NeMo Gym's servers"


def print_processors(head: str, used: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Print the median milliseconds of each contender in each kind of process."""
    rows = []
    for name, found in used.items():
        each = [statistics.median(found.get(kind) or [0.0]) for kind in Processors.KINDS]
        rows.append([name, *(f"{value:.2f}" for value in each), f"{sum(each):.2f}"])
    print_table([head, *Processors.KINDS, "all"], rows)


def files_of(pid: int) -> int:
    """Open descriptors; 0 if the process is gone."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def numbers(text: str) -> list[int]:
    """Of an option such as `1,20`."""
    return [int(part) for part in text.split(",")]


def describe(*packages: str) -> str:
    """One line: cores, memory, system, Python and the versions of `packages`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("gymgate", *packages))
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {versions}, load {os.getloadavg()[0]:.1f}"
    )


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """As Markdown; every column but the first is numbers."""
    for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows):
        print(f"| {' | '.join(cells)} |")
