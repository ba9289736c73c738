"""The bytes of one server-sent event."""

from __future__ import annotations

import re
from typing import Any

from gymgate import codec


def event(data: Any, name: str | None = None) -> bytes:
    """`name` becomes one line of letters, whatever an endpoint put into it."""
    head = b"event: %s\n" % re.sub(r"[^\w.-]", "_", name, flags=re.ASCII).encode() if name else b""
    return head + b"data: " + codec.dumps(data) + b"\n\n"
