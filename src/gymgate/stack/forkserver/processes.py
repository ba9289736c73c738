"""Processes of this machine as the kernel shows them: who descends from whom, whose helper is whose. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SERVER_TAG = "GYMGATE_SERVER"
"""Variable that a server's helpers inherit, with the server's pid."""

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def send_signal(pid: int, number: int, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)


def processes() -> dict[int, tuple[int, int]]:
    """pid -> (parent, session)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return found


def descendants(root: int) -> list[int]:
    parents = {pid: parent for pid, (parent, _) in processes().items()}
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [pid for pid, parent in parents.items() if parent in frontier]
        found.extend(frontier)
    return found


def helpers_of(server: int) -> list[int]:
    """Processes that a dead server started: of its session, or carrying its mark."""
    own = descendants(os.getpid())
    sessions = processes()
    return [pid for pid in own if sessions.get(pid, (0, 0))[1] == server or marked(pid, server)]


def marked(pid: int, server: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{SERVER_TAG}={server}".encode() in environment.split(b"\0")
