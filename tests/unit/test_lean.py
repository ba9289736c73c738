"""When servers get lean middlewares, as far as NeMo Gym's interpreter is not needed to see it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gymgate.gym.inside import lean
from gymgate.runs.described.settings import differences


def test_code_that_was_not_checked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(Path(json.__file__).read_bytes()).hexdigest()
    monkeypatch.setattr(lean, "CHECKED", {"json": ("0", digest)})
    assert lean.unchecked(lean.CHECKED) is None
    monkeypatch.setattr(lean, "CHECKED", {"json": ("0",)})
    assert "json" in str(lean.unchecked(lean.CHECKED))
    monkeypatch.setattr(lean, "CHECKED", {"json": ("0", digest), "no_such_package.module": (digest,)})
    assert "no_such_package" in str(lean.unchecked(lean.CHECKED))


def test_without_checked_code_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lean, "CHECKED", {"json": ("0",)})
    noted = tmp_path / "noted.json"
    lean.install(noted)  # it would fail here, where there is no nemo_gym
    assert list(json.loads(noted.read_text())) == ["every middleware"]
    assert "json" in capsys.readouterr().out


def test_a_run_goes_on_with_other_middlewares() -> None:
    before = {"nemo_gym": "0.7.0", "middlewares": {"mcqa": {"mcqa": "lean"}}}
    assert not differences(before, {"nemo_gym": "0.7.0"})
    assert not differences(before, {**before, "middlewares": {"mcqa": {"mcqa": "as in NeMo Gym"}}})
