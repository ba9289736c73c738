"""Ports that this process holds for its children, and who listens on them in the kernel's tables."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LISTEN = "0A"


class HeldPort:
    """A port that this process has bound without listening on it, so that nobody else is given it.

    A child can listen on it meanwhile: Linux lets a second socket bind where both have the same option set and the
    holder does not listen. NeMo Gym's servers set `SO_REUSEADDR`, vLLM sets `SO_REUSEPORT`. Raises `OSError`.
    """

    def __init__(self, port: int = 0, host: str = LOOPBACK, *, option: int = socket.SO_REUSEADDR) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


def listening_inodes(ports: Iterable[int]) -> dict[int, str]:
    """Inode of the socket that listens on each port; ports on which none does are left out."""
    wanted = {f"{port:04X}": port for port in ports}
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN and (port := wanted.get(fields[1].rpartition(":")[2])) is not None:
            found[port] = fields[9]
    return found


def owns_socket(pid: int, inode: str) -> bool:
    """Whether a process has that socket open."""
    target = re.compile(rf"socket:\[{inode}\]")
    try:
        return any(target.fullmatch(str(entry.readlink())) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
