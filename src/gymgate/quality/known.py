"""What is known about single environments: reads `known.toml`, which explains each table."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from gymgate.core.config import Settings


@cache
def known() -> dict[str, Any]:
    """The whole file."""
    return tomllib.loads((resources.files("gymgate.quality") / "known.toml").read_text(encoding="utf-8"))


def cause_of(environment: str, servers: Iterable[str] = ()) -> str | None:
    """Why rewards differ from the recorded ones, if that is known for the environment or a resources server of it."""
    causes: dict[str, str] = known()["causes"]
    return next((causes[name] for name in (environment, *servers) if name in causes), None)


def replay_settings(environment: str) -> Settings:
    """Dotted keys and values of the environment's config under which its recordings can be replayed."""
    return tuple(known()["replayed_with"].get(environment, {}).items())
