"""What is known of single environments, kept as data (`known.json`): causes of differences, places of judges' texts."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import orjson


@cache
def _known() -> dict[str, Any]:
    data: dict[str, Any] = orjson.loads((resources.files("gymgate.check") / "known.json").read_bytes())
    return data


def judge_texts(environment: str) -> tuple[str, ...]:
    """Dotted paths at which an environment's record holds what its judge said, as text."""
    return tuple(_known()["judge_texts"].get(environment, ()))


def cause_of(environment: str, version: str) -> str | None:
    """Why an environment's rewards differ from the recorded ones, where somebody found out."""
    causes = _known()["causes"]
    found = causes.get(f"{environment}@{version}") or causes.get(environment)
    return str(found) if found else None
