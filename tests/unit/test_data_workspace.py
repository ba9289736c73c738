"""One preparation at a time in a workspace; each config and each release of the user's own has a separate one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from gymgate.core.errors import SetupError
from gymgate.gym.preparation.program import workspace


def quiet(_: str) -> None: ...


def test_a_second_preparation_waits_and_gives_up_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path))
    told: list[str] = []
    with workspace("0.7.0", None, None, quiet, 1.0) as place:
        (place / "kept").touch()
        (place / ".stage" / "half.jsonl").touch()
        with pytest.raises(SetupError, match=r"\b0\.3 s"):
            workspace("0.7.0", None, None, told.append, 0.3).__enter__()
        others = [
            (Path("mine.yaml"), None),
            (None, Path("/my/checkout")),
            (Path("mine.yaml"), Path("/my/checkout")),
        ]
        with contextlib.ExitStack() as held:
            own = {held.enter_context(workspace("0.7.0", *other, quiet, 1.0)) for other in others}
        assert len({place, *own}) == 4
    (line,) = told
    assert f" {os.getpid()}" in line
    assert str(place) in line
    with workspace("0.7.0", None, None, told.append, 1.0) as again:
        assert (again == place, (place / "kept").exists(), [*(place / ".stage").iterdir()]) == (
            True,
            True,
            [],
        )


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "file"))
    with pytest.raises(SetupError, match="set GYMGATE_CACHE"):
        workspace("0.7.0", None, None, quiet, 1.0).__enter__()
