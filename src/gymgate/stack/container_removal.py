"""Containers that a stack's servers start by themselves: labelled, and removed when their rollout or the servers have ended.

A process that was killed removes nothing, so a small process of its own waits for the end of the daemon: this module's `main`.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time

from gymgate.core import codec
from gymgate.core.interpreter import module_command
from gymgate.gym.inside import forkserver
from gymgate.gym.runtime.containers import ROLLOUT, SERVERS, STACK, Selection, labels_of, remove_selected

GRACE_S = 3.0
"""For servers that still run to remove the containers of a rollout that has ended."""
_PAUSE_S = 0.5
"""Between scans: each starts docker once or twice."""
_LONG_PAUSE_S = 4.0
"""Between scans for a container that may only come once its image is pulled."""
_EMPTY_SCANS = 3
"""Scans in a row that find no container before the containers count as gone."""
_GIVE_UP_S = 120.0
"""After which containers that docker does not remove are left; `gymgate cache clean` finds them."""
_PULL_S = 600.0
"""How long a rollout's containers are looked for, with the long pause: its `docker run` may be pulling an image."""

logger = logging.getLogger(__name__)


class Containers:
    """The Docker containers of one stack. Starts its process with the first label."""

    def __init__(self) -> None:
        self._stack = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # environments start in several threads
        self._remover: subprocess.Popen[bytes] | None = None

    def new_labels(self) -> dict[str, str]:
        """Return the labels for the containers of servers that are about to start."""
        with self._lock:
            if self._remover is None:
                command = module_command("gymgate.stack.container_removal", self._stack)
                self._remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return labels_of(self._stack, f"{self._stack}.{next(self._numbers)}")

    def remove_of_servers(self, labels: dict[str, str]) -> None:
        """Have the containers with these labels removed, whose servers have ended. Does not wait."""
        if labels:
            self._order(Selection(SERVERS, labels[SERVERS]), 0.0)

    def remove_of_rollout(self, key: str) -> None:
        """Have the containers removed that were made for a rollout, by its key. Does not wait; servers have `GRACE_S`."""
        self._order(Selection(ROLLOUT, forkserver.rollout_label(key)), GRACE_S)

    @property
    def pids(self) -> set[int]:
        """The processes that are still at work when the daemon has exited."""
        if self._remover is None:
            return set()
        return {self._remover.pid, *forkserver.descendants(self._remover.pid)}

    def close(self) -> None:
        """Have all containers of the stack removed. Does not wait. Idempotent."""
        if self._remover is not None and self._remover.stdin is not None:
            self._remover.stdin.close()

    def _order(self, selection: Selection, grace_s: float) -> None:
        if self._remover is not None and self._remover.stdin is not None:
            try:
                os.write(self._remover.stdin.fileno(), codec.dumps([*selection, grace_s]) + b"\n")
            except OSError as error:
                logger.warning("containers of %s are not removed: %s", selection.value, error.strerror)


class _Removal:
    """When to look for containers: from `begins` on (monotonic), until several scans in a row find none."""

    def __init__(self, selection: Selection, begins: float) -> None:
        self.next = begins
        self._gives_up = begins + _GIVE_UP_S
        self._patient_until = begins + (_PULL_S if selection.label == ROLLOUT else 0.0)
        self._empty_scans = 0

    def schedule_next(self, found: bool) -> bool:
        """Count a scan that found containers or none; return whether another one is due, at `next`."""
        self._empty_scans = 0 if found else self._empty_scans + 1
        now, is_quiet = time.monotonic(), self._empty_scans >= _EMPTY_SCANS
        self.next = now + (_LONG_PAUSE_S if is_quiet else _PAUSE_S)
        return now < (self._patient_until if is_quiet else self._gives_up)


def _read(orders: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        orders.put(line)
    orders.put(b"")


def main() -> None:
    """Remove containers: those that are ordered on standard input, and all of the stack when that ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stack, ended = sys.argv[1], False
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=[orders], daemon=True).start()
    removals: dict[Selection, _Removal] = {}
    while removals or not ended:
        while not orders.empty() or not (removals or ended):
            now = time.monotonic()
            if line := orders.get():
                *fields, grace_s = codec.loads(line)
                selection = Selection(*fields)
                removals[selection] = _Removal(selection, now + grace_s)
            else:
                selection, ended = Selection(STACK, stack), True
                removals = {selection: _Removal(selection, now)}  # which are all
        due = [selection for selection, removal in removals.items() if removal.next <= time.monotonic()]
        matched = remove_selected(stack, due) if due else set()
        for selection in due:
            if not removals[selection].schedule_next(selection in matched):
                del removals[selection]
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
