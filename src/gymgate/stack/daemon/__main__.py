"""The stack's daemon: one process per stack, outside the SDK's interpreter lock, forks and event loops.

    python -m gymgate.stack.daemon LISTENING_FD SOCKET_PATH DIRECTORY CACHE STARTER_PID

A connection is a lease, unless its first message says that it only observes. The first one that says hello brings the
config of what is started. When the last lease is gone and `linger_s` has passed, everything stops and the process exits.
The stack of one process does not outlive that process, nor does a daemon whose starter died before anybody connected.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
from pathlib import Path

import uvloop

from gymgate.gateway.serving_process import relax_collector
from gymgate.gym.inside import forkserver
from gymgate.stack.daemon.process import Daemon
from gymgate.stack.paths import remove_traces


def main(argv: list[str]) -> None:
    """Serve on an inherited listening socket."""
    fd, path, directory, starter = int(argv[0]), Path(argv[1]), Path(argv[2]), int(argv[4])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    forkserver.prctl(forkserver.PR_SET_CHILD_SUBREAPER, 1)
    _without_core_files()
    listener = socket.socket(fileno=fd)
    listener.set_inheritable(False)
    relax_collector()
    try:
        uvloop.run(_serve(listener, path, directory, starter))
    finally:
        remove_traces(path, directory)


def _without_core_files() -> None:
    """Keep a crash from writing endpoints' keys to disk. The limit of one byte also stops the pipe of a core handler."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if hard == resource.RLIM_INFINITY or hard > 1:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


async def _serve(listener: socket.socket, path: Path, directory: Path, starter: int) -> None:
    """Serve, then exit without waiting for threads: one may wait for the lock of a runtime under construction."""
    await Daemon(listener, path, directory, starter).serve()
    remove_traces(path, directory)
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
