"""Whose the other end of a connection within this machine is."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from pathlib import Path

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
_ASKED = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH16s16s")
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
"""Any interface, any cookie."""
_STATE = _HEADER.size + 1
"""Offset of the socket's state in the kernel's answer."""
_OWNER = _HEADER.size + 4 + _PORTS.size + len(_ANY) + 12
"""Offset of the socket's user and inode in the kernel's answer."""
_ESTABLISHED = 1
"""The one state in which the kernel knows whose a socket is. It says user 0 of one that is closed."""
_TIMEOUT_S = 1.0
"""For the kernel's answer, which comes at once: the event loop waits for it."""
_IPV4 = 4
"""Bytes of an address."""
_MAPPED = bytes(10) + b"\xff\xff"
"""Before an IPv4 address that is written as an IPv6 one."""


def is_own(user: int | None) -> bool:
    """Whether a user is this process's, or root, who can act as any user."""
    return user in (os.getuid(), 0)


def user_of(transport: asyncio.BaseTransport | None) -> int | None:
    """Return the user whose process made the other end of a TCP connection.

    `None` if it is not on this machine, if either end is closing it, or if the kernel does not say. Takes 20 us, or 8 ms where
    `/proc` has to be read.
    """
    sock = transport.get_extra_info("socket") if transport is not None else None
    if transport is None or sock is None or transport.is_closing():
        return None
    try:
        ours, theirs = sock.getsockname(), sock.getpeername()
        return _by_netlink(sock.family, theirs, ours)
    except (OSError, struct.error):
        return None


def _by_netlink(family: int, theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    addresses = (socket.inet_pton(family, host[0]) for host in (theirs, ours))
    query = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    query += _PORTS.pack(theirs[1], ours[1], *addresses) + _ANY
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_TIMEOUT_S)
            kernel.send(_HEADER.pack(_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + query)
            answer = kernel.recv(4096)
    except OSError:  # forbidden, or not there
        return _by_proc(family, theirs, ours)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    user, inode = struct.unpack_from("=II", answer, _OWNER)
    return user if answer[_STATE] == _ESTABLISHED and inode else None


def _by_proc(family: int, theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    ends = [(socket.inet_pton(family, end[0]).removeprefix(_MAPPED), end[1]) for end in (theirs, ours)]
    tables = {"tcp6": [(_MAPPED[: 16 - len(packed)] + packed, port) for packed, port in ends]}
    if len(ends[0][0]) == _IPV4:  # which a socket for IPv6 can reach too
        tables["tcp"] = ends
    for name, pairs in tables.items():
        texts = [_as_in_proc(packed, port) for packed, port in pairs]
        users = [_established(Path("/proc/net", name), texts) for _ in range(2)]  # it may be closed meanwhile
        if None not in users:
            return users[0]
    return None


def _established(table: Path, ends: list[str]) -> int | None:
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends and int(fields[3], 16) == _ESTABLISHED and fields[9] != "0":
            return int(fields[7])
    return None


def _as_in_proc(packed: bytes, port: int) -> str:
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
