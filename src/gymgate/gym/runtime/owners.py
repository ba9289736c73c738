"""The process that owns a directory or a container, named so that only a process that can see it judges whether it lives.

A process number has no meaning on another machine or in another PID namespace, and those may share the home directory, `/tmp`
or the Docker daemon.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import select
from pathlib import Path

_OWNER = re.compile(r"([a-z2-7]{8})-(\d{1,9})")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
UNREACHABLE_PROCESS = "in another PID namespace, on another machine or of an earlier boot"
"""Where a process may be that cannot be judged, for messages."""


def pid_namespace_id() -> str:
    """Return a name of 8 characters for this boot of this machine and this PID namespace, in which process numbers are unique."""
    try:
        boot, namespace = _BOOT_ID.read_text().strip(), str(_NAMESPACE.readlink())
    except OSError:  # some sandboxes have neither; each has its own host name
        boot, namespace = os.uname().nodename, ""
    digest = hashlib.sha256(f"{boot} {namespace}".encode()).digest()
    return base64.b32encode(digest[:5]).decode().lower()


def owner() -> str:
    """Return the name of this process."""
    return f"{pid_namespace_id()}-{os.getpid()}"


def has_ended(name: str) -> bool | None:
    """Return whether the process of that name has ended; `None` if that cannot be judged from here."""
    parts = _OWNER.fullmatch(name)
    if parts is None or parts[1] != pid_namespace_id():
        return None
    try:
        descriptor = os.pidfd_open(int(parts[2]))
    except ProcessLookupError:
        return True
    except OSError:
        return None
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))  # a zombie has ended, too
    finally:
        os.close(descriptor)
