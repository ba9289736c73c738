"""Checks before a run or a training: this machine, package versions, servers, the renderer, and a rollout of each agent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool | None
    """`None` for something that is missing and not required."""
    detail: str
