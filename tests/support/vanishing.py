"""Sockets that look from outside as if their node had vanished: the kernel drops all that arrives for them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""The packet filter `return 0`."""


def vanish(sock: socket.socket) -> None:
    """Acknowledge nothing on a connection any more, and accept none on a listening socket."""
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def vanish_process() -> None:
    """Do so with all TCP sockets of this process."""
    for fd in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=os.dup(int(fd.name)))
        except OSError:  # not a socket
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                vanish(sock)
