"""uv's downloads while NeMo Gym is installed: one line, not one for each package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymgate.gym.runtime import install
from gymgate.gym.runtime.interpreters import Interpreter


def test_downloads_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    lines = "\n".join(f"Downloading package{number} (1.8MiB)" for number in range(27))
    uv.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{lines}\nBuilding slow @ 1.0\nEND\n")
    uv.chmod(0o755)
    monkeypatch.setattr("gymgate.gym.runtime.uv.find_uv", lambda: uv)
    told: list[str] = []
    recipe: Any = None
    installation = install.Installation(
        recipe, Interpreter(Path("python"), (3, 13, 14)), tmp_path, 0, told.append
    )
    installation._install("nemo-gym")
    assert told == ["building slow @ 1.0", "downloaded 27 large packages"]
