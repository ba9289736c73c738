"""Addresses that commands listen on."""

from __future__ import annotations

import socket

from gymgate.core.errors import ConfigError
from gymgate.core.http_client import url_host


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` for an address that cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # which repeats the address
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None


def url_address(listener: socket.socket) -> str:
    """Return a listener's address as URLs have it."""
    host, port = listener.getsockname()[:2]
    return f"{url_host(host)}:{port}"
