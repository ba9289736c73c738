"""Ports that this process holds for its children, and whether these listen and answer there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from gymgate.core.http_client import LOOPBACK

_LISTEN = "0A"
_REQUEST = b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class HeldPort:
    """A port that this process has bound without listening on it, so that nobody else is given it.

    A child can listen on it meanwhile: Linux lets a second socket bind where both have the same option set and the
    holder does not listen. NeMo Gym's servers set `SO_REUSEADDR`. So does vLLM, with `SO_REUSEPORT` in addition: vLLM 0.31 only
    where several of its processes share the port. Raises `OSError`.
    """

    def __init__(
        self, port: int = 0, host: str = LOOPBACK, *, options: Sequence[int] = (socket.SO_REUSEADDR,)
    ) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for option in options:
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


async def until_answer(port: int) -> None:
    """Return when the server on a loopback port has answered a request, with any status. Raises `OSError` if it breaks off."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        writer.write(_REQUEST)
        if not await reader.readline():
            raise ConnectionResetError(f"no answer on port {port}")
    finally:
        writer.close()


async def listens(pid: int, port: int) -> bool:
    """Whether this very process listens on a loopback port, and not another one in its place."""
    try:
        _, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    # Only now, and in a thread: the kernel's table has a line for each connection of the machine.
    return await asyncio.to_thread(_is_listener, pid, port)


def _is_listener(pid: int, port: int) -> bool:
    listening = {
        f"socket:[{fields[9]}]"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[3] == _LISTEN and fields[1].endswith(f":{port:04X}")
    }
    try:
        files = Path(f"/proc/{pid}/fd").iterdir()
        return bool(listening) and any(str(entry.readlink()) in listening for entry in files)
    except OSError:
        return False
