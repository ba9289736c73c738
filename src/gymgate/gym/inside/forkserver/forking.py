"""Imports NeMo Gym once and forks a child per server. Runs in NeMo Gym's own interpreter and imports nothing of gymgate.

    <runtime python> forkserver/__main__.py CONTROL_FD

Orders come in and events go out on the control socket, one JSON object a line:

    {"op": "parse", "id": 1, "log": path, "out": path, "directory": path, "config_paths": [...],
     "initial": {...}, "overrides": [[dotted key, value], ...], "policy": name}
    {"op": "serve", "id": 2, "log": path, "directory": path, "entrypoint": "app.py", "instance": name,
     "config": {...}, "ray": false, "commands": directory that precedes PATH,
     "labels": {of Docker containers}, "rollout_label": name of one more,
     "lean": file that says which middlewares stay the release's; absent if all do}
    {"op": "ray",   "id": 3, "log": path, "out": path, "directory": path}
    {"op": "kill",  "pid": 123, "signal": 2, "group": false}
    {"op": "ping"}
    <- {"event": "ready", "threads": 1}  {"event": "started", "id": 1, "pid": 123}  {"event": "pong"}
       {"event": "exited", "pid": 123, "status": 0}           status as of subprocess: -9 for SIGKILL

When the control socket ends, everything that was started here is killed, helpers of servers included.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ..processes import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    SERVER_TAG,
    descendants,
    helpers_of,
    prctl,
    send_signal,
)
from ..resolve import resolve
from .preloading import preload
from .serving import ray_head, serve


def parse(order: dict[str, Any]) -> None:
    """Write to `out` the config as NeMo Gym's own parser resolves it."""
    os.chdir(order["directory"])  # the config's relative paths start there
    Path(order["out"]).write_text(json.dumps(resolve(order)))


CHILDREN = {"parse": parse, "serve": serve, "ray": ray_head}


class ForkServer:
    """The loop. Single-threaded, so that a fork copies a consistent process."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.received = b""
        self.children: set[int] = set()
        self.wakeup, self.waker = socket.socketpair()
        for end in (self.wakeup, self.waker):
            end.setblocking(False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon handles Ctrl-C
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        self.emit(event="ready", threads=len(list(Path("/proc/self/task").iterdir())))
        while True:
            readable, _, _ = select.select([self.control, self.wakeup], [], [])
            if self.wakeup in readable:
                self.wakeup.recv(4096)
                self.reap()
            if self.control in readable and not self.receive():
                return

    def emit(self, **event: Any) -> None:
        self.control.sendall(json.dumps(event).encode() + b"\n")

    def receive(self) -> bool:
        """Handle what has arrived; false at the end of the orders."""
        data = self.control.recv(1 << 20)
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            self.handle(json.loads(line))
        return bool(data)

    def handle(self, order: dict[str, Any]) -> None:
        if order["op"] == "ping":
            self.emit(event="pong")
        elif order["op"] == "kill":
            if order["pid"] in self.children:
                send_signal(order["pid"], order["signal"])  # it may not lead its group yet
                if order["group"]:
                    send_signal(order["pid"], order["signal"], group=True)
        else:
            pid = self.fork(order)
            self.children.add(pid)
            self.emit(event="started", id=order["id"], pid=pid)

    def fork(self, order: dict[str, Any]) -> int:
        parent = os.getpid()
        flush_all()  # what is buffered would be written by both
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self.enter_child(order, parent)
                CHILDREN[order["op"]](order)
                status = 0
            except SystemExit as stop:
                if stop.code is None or isinstance(stop.code, int):
                    status = stop.code or 0
                else:
                    print(stop.code, file=sys.stderr)  # as Python does
            except BaseException:
                traceback.print_exc()
            finally:
                flush_all()
                os._exit(status & 0xFF)
        return pid

    def enter_child(self, order: dict[str, Any], parent: int) -> None:
        """Give the child its own session, log and signals. It dies with the fork server."""
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the fork server died before the kernel knew whom to tell
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self.control, self.wakeup, self.waker):
            end.close()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ[SERVER_TAG] = str(os.getpid())

    def reap(self) -> None:
        """Report the children that ended, and kill what they left behind."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self.children:  # otherwise a helper that lost its server
                    self.children.remove(pid)
                    for helper in helpers_of(pid):
                        send_signal(helper, signal.SIGKILL)
                    self.emit(event="exited", pid=pid, status=os.waitstatus_to_exitcode(status))

    def kill_all(self) -> None:
        """Kill every descendant, until none is left or a second has passed."""
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                for pid in descendants(os.getpid()):
                    send_signal(pid, signal.SIGKILL)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.01)


def flush_all() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def is_other_end_closed(control: socket.socket) -> bool:
    """Whether the other end of the control socket is closed and has sent nothing."""
    try:
        return not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def main() -> None:
    """Serve on the inherited control socket until it ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # Hydra, which NeMo Gym reads its command line with, would take our number for a setting.
    sys.argv = sys.argv[:1]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # while importing; afterwards the end of the orders is enough
    if is_other_end_closed(control):
        return  # the daemon died before the kernel knew whom to tell
    gc.disable()  # imports make much that stays, and hardly any garbage
    preload()
    prctl(PR_SET_PDEATHSIG, 0)
    server = ForkServer(control)
    gc.freeze()  # a collection in a child would write to every object, and so copy the pages that all share
    gc.enable()
    try:
        server.run()
    except OSError:
        pass  # the daemon is gone
    finally:
        server.kill_all()
