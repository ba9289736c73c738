"""How much memory a family of processes uses, and when it is too much."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from gymgate.stack.forkserver import descendants

WATCH_S = 0.5


async def over_limit(pid: int, memory_gb: float) -> str:
    """Return, with the amount in words, when a process and its descendants use more memory than that."""
    while True:
        await asyncio.sleep(WATCH_S)
        if rss(family := [pid, *descendants(pid)]) > memory_gb:  # cheap, an upper bound
            used = await asyncio.to_thread(pss, family)
            if used > memory_gb:
                return f"its processes used {used:.1f} GB of memory; the limit is {memory_gb:g} GB (--memory)"


def rss(pids: Sequence[int]) -> float:
    """Resident memory of processes together in GB, shared pages counted for each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def pss(pids: Sequence[int]) -> float:
    """Memory of processes together in GB, shared pages counted once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total * 1024 / 1e9
