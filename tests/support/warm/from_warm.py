"""In a stack's daemon: a fork server that a warm process forks, in place of one that imports NeMo Gym itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

DIRECTORY = "GYMGATE_TEST_FORK_SERVERS"
OWN = ("PATH", "RAY_AUTH_TOKEN")
"""Variables that differ from stack to stack and that no import reads."""


def install() -> None:
    """Replace how the daemon starts the program of a fork server; all else stays as it is."""
    from gymgate.stack import forkserver_client

    names: Any = SimpleNamespace(**vars(subprocess))
    names.Popen = start
    forkserver_client.subprocess = names  # type: ignore[attr-defined]


def start(command: Sequence[str], *, env: Mapping[str, str], **settings: Any) -> Any:
    """Let the warm fork server of this interpreter and these variables fork. Without one, start as usual, and ask for it."""
    python, program, control = command
    shared = {name: value for name, value in env.items() if name not in OWN}
    wanted = json.dumps({"python": python, "program": program, "env": shared}, sort_keys=True)
    if DIRECTORY not in os.environ:
        return subprocess.Popen(command, env=env, **settings)
    path = Path(os.environ[DIRECTORY]) / hashlib.sha256(wanted.encode()).hexdigest()[:12]
    try:
        return Forked(
            path.with_suffix(".sock"),
            command,
            {"env": dict(env), "cwd": str(settings["cwd"])},
            int(control),
            settings["stdout"],
        )
    except OSError:  # nobody listens
        if path.parent.is_dir():
            path.with_suffix(f".{os.getpid()}.new").write_text(wanted)
            path.with_suffix(f".{os.getpid()}.new").rename(path.with_suffix(f".{os.getpid()}.wanted"))
        return subprocess.Popen(command, env=env, **settings)


class Forked:
    """What is used of `subprocess.Popen`, for a process that is not our child."""

    def __init__(
        self, address: Path, command: Sequence[str], order: dict[str, Any], control: int, log: BinaryIO
    ) -> None:
        self.args = list(command)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as warm:
            warm.connect(str(address))
            socket.send_fds(warm, [json.dumps(order).encode()], [control, log.fileno()])
            answer = warm.recv(100)
        if not answer:
            raise ConnectionError("the warm fork server is gone")
        self.pid = int(answer)
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
