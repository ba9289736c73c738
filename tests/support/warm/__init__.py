"""One warm fork server per interpreter and test process, so that a stack's start does not import NeMo Gym anew.

Only tests that ask for `warm_fork_servers` get it. Their fork servers are not descendants of the daemon: tests that kill
one, or that look at the tree of processes, do without.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from .from_warm import DIRECTORY

HERE = Path(__file__).parent
WORTH = 2
"""So many stacks must have asked for the same interpreter and variables."""


class WarmForkServers:
    """Starts a warm fork server when stacks have asked for it; all end with `close`, or with this process."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp")  # short enough for sockets
        self._asked: Counter[str] = Counter()
        self._running: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    @property
    def variables(self) -> dict[str, str]:
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {DIRECTORY: self._directory.name, "PYTHONPATH": os.pathsep.join(paths)}

    def start_wanted(self) -> None:
        """Start those that enough stacks have asked for. Does not wait for their imports: a stack that asks does."""
        for path in Path(self._directory.name).glob("*.wanted"):
            name, wanted = path.name.partition(".")[0], json.loads(path.read_text())
            path.unlink()
            self._asked[name] += 1
            if self._asked[name] >= WORTH and name not in self._running:
                self._running[name] = self._start(Path(self._directory.name) / f"{name}.sock", wanted)

    def close(self) -> None:
        for process, life in self._running.values():
            life.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()

    def _start(self, path: Path, wanted: dict[str, Any]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        life, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, theirs:
            listener.bind(str(path))
            listener.listen(64)
            ends = [listener.fileno(), theirs.fileno()]
            process = subprocess.Popen(
                [wanted["python"], str(HERE / "warm_server.py"), *map(str, ends), wanted["program"]],
                env=wanted["env"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=ends,
                start_new_session=True,
            )
        return process, life
