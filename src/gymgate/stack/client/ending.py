"""Daemons ended from outside: told to stop, and killed with everything below them if they do not.

A signal goes to a descriptor of a process (pidfd), never to a number, which may be another process's by then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from gymgate.core.interpreter import runs_module
from gymgate.gym.inside.forkserver import arguments_of, descendants
from gymgate.stack.client.daemons import DaemonProcess, connect_to_observe, read_daemon
from gymgate.stack.paths import remove_of_dead, remove_traces, socket_lock

STOP_S = 10.0
"""For a daemon to stop everything, before it is killed. One that does not hang takes 5 s at most."""
GRACE_S = 2.0
"""For a fork server to end its servers, after its daemon has ended."""
KILL_S = 5.0
"""For killed processes to be gone."""

Ending = Literal["stopped", "killed", "still there"]


def end_daemons(daemons: Iterable[DaemonProcess], *, now: bool) -> dict[DaemonProcess, Ending]:
    """End daemons and everything that they started, all at once; `now`: without letting them do it. Bounded.

    Daemons that have ended meanwhile count as stopped. Files that they leave are removed.
    """
    with contextlib.ExitStack() as exits:
        families = [exits.enter_context(_Family(daemon)) for daemon in daemons]
        if not now:
            for family in families:
                family.send(signal.SIGTERM)
        killed = _left(families, 0.0 if now else STOP_S)
        for family in killed:
            family.look()  # first: what a dead daemon leaves is no longer below it
            family.send(signal.SIGKILL)
        _left(families, GRACE_S, below=True)
        for family in families:
            family.kill_below()
        left = _left(families, KILL_S, below=True)
        endings: dict[DaemonProcess, Ending] = {family.daemon: "stopped" for family in families}
        endings |= {family.daemon: "killed" for family in killed}
        endings |= {family.daemon: "still there" for family in left}
    for daemon, ending in endings.items():
        if ending != "still there":
            _remove_files(daemon)
    return endings


class _Family:
    """A daemon's process and those below it."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self._descriptors: dict[int, int] = {}
        """By process; the daemon's is missing if it has ended or is another process's."""

    def __enter__(self) -> _Family:
        self._hold(self.daemon.pid)
        # Only now: while a process is held, its number is no other's.
        if read_daemon(self.daemon.pid) != self.daemon:
            self._let_go(self.daemon.pid)
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self._descriptors]:
            self._let_go(pid)

    def look(self) -> None:
        """Take in what is below the daemon now, but not what removes its containers when it has ended."""
        new = [pid for pid in self._below() if pid not in self._descriptors]
        for pid in new:
            self._hold(pid)
        for pid in {*new} - {*self._below()}:  # ended before it was held: the number may be another's
            self._let_go(pid)

    def send(self, number: int) -> None:
        """Send the daemon a signal."""
        self._send(self.daemon.pid, number)

    def kill_below(self) -> None:
        """Kill what is left below the daemon."""
        for pid in self._descriptors.keys() - {self.daemon.pid}:
            self._send(pid, signal.SIGKILL)

    def held(self, *, below: bool) -> set[int]:
        """Return the descriptors of the daemon, and with `below` of the others."""
        return {pidfd for pid, pidfd in self._descriptors.items() if below or pid == self.daemon.pid}

    def _below(self) -> list[int]:
        if read_daemon(self.daemon.pid) != self.daemon:
            return []
        pids = descendants(self.daemon.pid)
        removers = {pid for pid in pids if _removes_containers(pid)}
        spared = removers.union(*map(descendants, removers))
        return [pid for pid in pids if pid not in spared]

    def _hold(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._descriptors[pid] = os.pidfd_open(pid)

    def _let_go(self, pid: int) -> None:
        if (descriptor := self._descriptors.pop(pid, None)) is not None:
            os.close(descriptor)

    def _send(self, pid: int, number: int) -> None:
        if (descriptor := self._descriptors.get(pid)) is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)


def _left(families: Sequence[_Family], seconds: float, *, below: bool = False) -> list[_Family]:
    """Return the families of which something runs after so many seconds; sooner if nothing does."""
    running = {descriptor for family in families for descriptor in family.held(below=below)}
    poll, deadline = select.poll(), time.monotonic() + seconds
    for descriptor in running:
        poll.register(descriptor, select.POLLIN)
    while running and (ended := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            running.discard(descriptor)
    return [family for family in families if running & family.held(below=below)]


def _removes_containers(pid: int) -> bool:
    try:
        return runs_module(arguments_of(pid), "gymgate.stack.container_removal")
    except OSError:
        return False


def _remove_files(daemon: DaemonProcess) -> None:
    """Remove what a daemon leaves that was killed, unless another one has taken its place."""
    path = daemon.command.socket_path
    with contextlib.suppress(FileNotFoundError), socket_lock(path):
        try:
            connect_to_observe(path).close()
        except ConnectionRefusedError:
            path.unlink()
        except BlockingIOError:
            pass
    remove_traces(path, daemon.command.directory)
    remove_of_dead()
