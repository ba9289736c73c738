"""Containers that a stack's servers start by themselves: labelled, and removed when the servers have ended, however they ended.

A process that was killed removes nothing, so a small process of its own waits for the end of the daemon: this module's `main`.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading

from gymgate.runtime.containers import SERVERS, STACK, labels_of, remove_labelled

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
            self._remover = subprocess.Popen(
                [sys.executable, "-P", "-m", "gymgate.stack.containers", self._stack], stdin=subprocess.PIPE
            )
            self._remover.wait()  # it has forked, so that it is not killed with the daemon's children
        return labels_of(self._stack, f"{self._stack}.{next(self._numbers)}")

    def remove(self, labels: dict[str, str]) -> None:
        """Have the containers with these labels removed, whose servers have ended. Does not wait."""
        if labels and self._remover is not None and self._remover.stdin is not None:
            try:
                os.write(self._remover.stdin.fileno(), f"{labels[SERVERS]}\n".encode())
            except OSError as error:
                logger.warning("containers of %s are not removed: %s", labels[SERVERS], error.strerror)

    def close(self) -> None:
        """Have all containers of the stack removed. Does not wait. Idempotent."""
        if self._remover is not None and self._remover.stdin is not None:
            self._remover.stdin.close()


def main() -> None:
    """Remove containers: of servers that are named on standard input, and of the whole stack when that ends."""
    if os.fork():
        return
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    removals = []
    for line in sys.stdin:
        removal = threading.Thread(target=remove_labelled, args=(SERVERS, line.strip()))
        removal.start()
        removals.append(removal)
    remove_labelled(STACK, sys.argv[1])
    for removal in removals:
        removal.join()


if __name__ == "__main__":
    main()
