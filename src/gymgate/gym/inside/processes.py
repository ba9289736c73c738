"""Processes of this machine, as the kernel shows them: descendants, and helpers of a server. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SERVER_TAG = "GYMGATE_SERVER"
"""Variable with a server's pid, which its helpers inherit."""

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def send_signal(pid: int, number: int, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)


def stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on. Raises `OSError`."""
    # A command's name may hold any bytes, also another user's, but no later field does.
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def processes() -> dict[int, tuple[int, int]]:
    """Return pid -> (parent, session)."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                _, parent, _, session, *_ = stat(int(entry.name))
                table[int(entry.name)] = (int(parent), int(session))
    return table


def descendants(root: int) -> list[int]:
    parents = {pid: parent for pid, (parent, _) in processes().items()}
    below: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [pid for pid, parent in parents.items() if parent in frontier]
        below.extend(frontier)
    return below


def helpers_of(server: int) -> list[int]:
    """Return the processes that a dead server started: of its session, or tagged with its pid."""
    sessions = {pid: session for pid, (_, session) in processes().items()}
    return [pid for pid in descendants(os.getpid()) if sessions.get(pid) == server or is_tagged(pid, server)]


def arguments_of(pid: int) -> list[str]:
    """Return the command line of a process; empty for a zombie. Raises `OSError`."""
    return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]


def proportional_bytes(pids: Iterable[int]) -> int:
    """Return the memory of some processes together; shared pages count once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total * 1024


def is_tagged(pid: int, server: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{SERVER_TAG}={server}".encode() in environment.split(b"\0")
