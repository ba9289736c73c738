"""Runs in NeMo Gym's interpreter: imports what a fork server does, once, and forks a fork server for each stack that asks.

    python warm_server.py LISTENER_FD LIFE_FD PROGRAM

Each gets its variables, its directory, its log and its control socket with the request. Ends when `LIFE_FD` does.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
from typing import Any


def main() -> None:
    listener, life = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    server = load(sys.argv[3])
    sys.argv[:] = sys.argv[3:]
    server.preload()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while life not in (ready := select.select([listener, life], [], [])[0]):
        assert listener in ready
        connection, _ = listener.accept()
        data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not data:
            continue
        if (pid := os.fork()) == 0:
            try:
                for end in (listener, life, connection):
                    end.close()
                be_fork_server(server, json.loads(data), *fds)
            finally:
                os._exit(1)
        connection.send(str(pid).encode())
        connection.close()
        for fd in fds:
            os.close(fd)


def load(program: str) -> Any:
    """The fork server's modules, as its program loads them."""
    spec = importlib.util.spec_from_file_location("forkserver_program", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load()
    sys.path.pop(0)
    return importlib.import_module(f"{module.NAME}.forkserver.forking")


def be_fork_server(server: Any, order: dict[str, Any], control: int, log: int) -> None:
    """What the program does after its imports, as if it had been started with this order's variables and files."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    server.prctl(server.PR_SET_CHILD_SUBREAPER, 1)
    forked = server.ForkServer(socket.socket(fileno=control))
    try:
        forked.run()
    except OSError:
        pass  # the daemon is gone
    finally:
        forked.kill_all()
        os._exit(0)


if __name__ == "__main__":
    main()
