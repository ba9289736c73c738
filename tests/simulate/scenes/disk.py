"""A run whose disk is full at any of its writes, and whose process is killed; it is resumed once there is room."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import simloom
from invariants import Ledger
from parts import ROLLOUTS, CollectedRollout, DataError, StackLostError, files
from simloom._context import current_host
from universes import Scene

from scenes.collect import Run, account, directory, name_of, new_run, take
from scenes.faults import seconds

VISITS = 6
WRITES = 60
"""A run makes about so many."""
TORN = b'{"task": 0, "repeat": 0, "rew'


class Disk:
    """The file system below a directory, with room for a number of writes, and the files that are open there."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self.room: int | None = None
        """Writes until it is full; `None`: it never is."""
        self._open: dict[int, simloom.Host | None] = {}
        """With the host that opened each."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Count what is written below the directory, and refuse it when there is no room."""
        write, open_, close, make = os.write, os.open, os.close, files._scratch

        def counted_write(number: int, data: bytes) -> int:
            if number in self._open and not self._has_room():
                if (fitting := simloom.draw("bytes that fit", len(data))) == 0:
                    raise self._full()
                simloom.reached("line torn by a full disk")
                return write(number, data[:fitting])
            return write(number, data)

        def counted_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
            is_here = str(path).startswith(self._directory)
            if is_here and flags & os.O_CREAT and not Path(path).exists() and not self._has_room():
                raise self._full()
            number = open_(path, flags, *args, **options)
            if is_here and flags & (os.O_WRONLY | os.O_RDWR):
                self._open[number] = current_host.get()
            return number

        def counted_close(number: int) -> None:
            self._open.pop(number, None)
            close(number)

        def counted_make(path: Path) -> Path:
            if not self._has_room():
                raise self._full()
            return make(path)

        with contextlib.ExitStack() as patches:
            for where, name, new in (
                (os, "write", counted_write),
                (os, "open", counted_open),
                (os, "close", counted_close),
                (os, "fdatasync", self._sync),
                (os, "fsync", self._sync),
                (files, "_scratch", counted_make),
            ):
                patches.enter_context(mock.patch.object(where, name, new))
            yield

    def let_go(self, host: simloom.Host) -> None:
        """Close the files of a host that is killed, as the kernel does; their numbers stay taken until the universe ends."""
        with open(os.devnull, "r+b", buffering=0) as null:  # noqa: PTH123
            for number in [number for number, owner in self._open.items() if owner is host]:
                os.dup2(null.fileno(), number)
                del self._open[number]

    def _sync(self, number: int) -> None:
        if number in self._open and not self._has_room():
            raise self._full()

    def _has_room(self) -> bool:
        if self.room:
            self.room -= 1
        is_full = self.room == 0
        if is_full and simloom.sometimes("room for what comes next", 30):
            self.room = None
        return not is_full

    def _full(self) -> OSError:
        simloom.reached("disk full")
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def play(world: Any, ledger: Ledger) -> None:
    with directory() as output:
        disk, given = Disk(output), dict[str, Any]()
        with disk.entered():
            for visit in range(VISITS):
                is_last = visit == VISITS - 1
                is_full = not is_last and simloom.sometimes("disk gets full", 60)
                disk.room = 1 + simloom.draw("room", WRITES) if is_full else None
                run = new_run(output, ledger, most_losses=1)
                host = world.host(f"collector{visit}")
                task = host.spawn(lambda run=run: take_what_fits(run, given))
                if not is_last and simloom.sometimes("killed", 30):
                    await asyncio.wait([task], timeout=seconds("until it is killed", 15.0))
                    if not task.done():
                        kill(host, run, disk, writes=True)
                        continue
                if (told := await task) is not None:
                    account(run, told)
                    return


async def take_what_fits(run: Run, given: dict[str, Any]) -> list[CollectedRollout] | None:
    try:
        return await take(run, given)
    except (DataError, StackLostError):
        return None


def kill(host: Any, run: Run, disk: Disk, *, writes: bool) -> None:
    """Kill the process of a run, perhaps in the middle of a line if it writes; what it had in flight is paid for again."""
    for _, planned in run.in_flight.values():
        run.ledger.reasons[name_of(planned.task, planned.identity.repeat)] += 1
    host.crash()
    disk.let_go(host)
    assert run.output is not None
    if writes and (run.output / ROLLOUTS).exists() and simloom.sometimes("killed in a line", 50):
        with (run.output / ROLLOUTS).open("ab") as file:
            file.write(TORN)


SCENE = Scene(
    "disk",
    play,
    (
        "disk gets full",
        "disk full",
        "room for what comes next",
        "line torn by a full disk",
        "killed",
        "killed in a line",
        "stack lost",
    ),
    deadline_s=900,
)
