"""The result of one check."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one check of the doctor."""

    name: str
    ok: bool | None
    """`None` for something that is missing and not required."""
    detail: str
