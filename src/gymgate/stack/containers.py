"""Containers that a stack's servers start by themselves: labelled, and removed when the servers have ended, however they ended.

A process that was killed removes nothing, so a small process of its own waits for the end of the daemon: this module's `main`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time

from gymgate.runtime.containers import SERVERS, STACK, labels_of, remove_labelled
from gymgate.stack import forkserver

GRACE_S = 3.0
"""For servers to remove the containers of a rollout that was cancelled."""

logger = logging.getLogger(__name__)


class Containers:
    """The Docker containers of one stack. Starts its process with the first label."""

    def __init__(self) -> None:
        self._stack = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._remover: subprocess.Popen[bytes] | None = None

    def new_labels(self) -> dict[str, str]:
        """Return the labels for the containers of servers that are about to start."""
        if self._remover is None:
            command = [sys.executable, "-P", "-m", "gymgate.stack.containers", self._stack]
            self._remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return labels_of(self._stack, f"{self._stack}.{next(self._numbers)}")

    def remove(self, labels: dict[str, str], after: float = 0.0, before: float = math.inf) -> None:
        """Have the containers with these labels removed that were made between two moments (Unix time). Does not wait.

        Where `before` is given, their servers still run and have `GRACE_S` to remove them themselves.
        """
        if labels and self._remover is not None and self._remover.stdin is not None:
            try:
                os.write(self._remover.stdin.fileno(), f"{labels[SERVERS]} {after} {before}\n".encode())
            except OSError as error:
                logger.warning("containers of %s are not removed: %s", labels[SERVERS], error.strerror)

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


def _remove(servers: str, after: str, before: str) -> None:
    until = float(before)
    if until != math.inf:
        time.sleep(GRACE_S)
    remove_labelled(SERVERS, servers, float(after), until)


def main() -> None:
    """Remove containers: of servers that are named on standard input, and of the whole stack when that ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    removals = []
    for line in sys.stdin:
        removal = threading.Thread(target=_remove, args=line.split())
        removal.start()
        removals.append(removal)
    remove_labelled(STACK, sys.argv[1])
    for removal in removals:
        removal.join()


if __name__ == "__main__":
    main()
