"""Ports for servers that take a number and not a socket: held until the server has bound its own."""

from __future__ import annotations

import socket

from gymgate.errors import ConfigError


class HeldPort:
    """A port that this process has bound, without listening on it.

    Servers that bind with `SO_REUSEPORT`, as vLLM does, can take it while it is held, which nobody else can; for
    others it has to be let go first.
    """

    def __init__(self, port: int = 0, host: str = "") -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"port {port} cannot be used: {error.strerror}; name another --port") from error
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let it go; idempotent."""
        self._socket.close()
