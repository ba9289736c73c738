"""The bytes of one server-sent event."""

from __future__ import annotations

from typing import Any

import orjson


def event(data: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
