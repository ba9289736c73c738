"""Ports of NeMo Gym's servers: held by the daemon for the stack's life, and seen in the kernel's tables."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LISTEN = "0A"


class HeldPort:
    """A loopback port that nobody else is given; a child server listens on it while we only keep it bound.

    Linux lets a second socket bind and listen where both have SO_REUSEADDR and the holder does not listen, and
    hands such a port out to nobody who asks for any port.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
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
