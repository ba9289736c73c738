"""Which interpreter is chosen. The programs found are scripts that answer as that Python would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gymgate.errors import SetupError
from gymgate.runtime import interpreters
from gymgate.runtime.interpreters import (
    choose,
    find_interpreters,
    is_named,
    named_interpreter,
    numbered_commands,
)

FLOOR = (3, 13, 14)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose only interpreters are those put under the returned directory's pyenv; the network is off."""
    monkeypatch.setattr(interpreters, "_DIRECTORIES", ("{pyenv}/versions/*/bin", "{conda}/bin"))
    for name in ("PYENV_ROOT", "CONDA_EXE", "CONDA_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CONDA_ROOT", str(tmp_path / "conda"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setenv("GYMGATE_OFFLINE", "1")
    return tmp_path


def put(home: Path, version: str, *, implementation: str = "CPython", gil: bool = True) -> Path:
    """A script that answers as this version does."""
    major, minor, patch = map(int, version.split("."))
    path = home / ".pyenv" / "versions" / version / "bin" / f"python{major}.{minor}"
    path.parent.mkdir(parents=True)
    answer = {
        "implementation": implementation,
        "version": [major, minor, patch],
        "final": True,
        "wide": True,
        "gil": gil,
        "base": str(path.parents[1]),
        "executable": str(path),
    }
    path.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    path.chmod(0o755)
    return path


def broken(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("here", "order"),
    [
        (["3.12.1", "3.13.0"], ["3.13.0", "3.12.1"]),
        (["3.14.1", "3.12.1", "3.11.9"], ["3.14.1", "3.12.1"]),
        (["3.13.20", "3.14.1", "3.13.0", "3.13.15"], ["3.13.20", "3.13.15", "3.14.1", "3.13.0"]),
    ],
)
def test_order(home: Path, here: list[str], order: list[str]) -> None:
    """Those that meet the minimum first, 3.13 before others, then 3.12, then 3.14; never 3.11."""
    for version in here:
        put(home, version)
    assert [each.label for each in choose(None, FLOOR, print)] == order


def test_what_does_not_answer_is_passed_over(home: Path) -> None:
    put(home, "3.13.0")
    put(home, "3.13.9", implementation="PyPy")
    put(home, "3.13.8", gil=False)
    broken(
        home / ".pyenv/versions/3.13.7/bin/python3.13",
        "echo 'pyenv: python3.13: command not found' >&2; exit 127",
    )
    broken(home / ".pyenv/versions/3.13.6/bin/python3.13", "echo not json")
    broken(home / "shims" / "python3.13", "sleep 100")
    assert [each.label for each in find_interpreters()] == ["3.13.0"]


def test_none_at_all_says_how_to_get_one(home: Path) -> None:
    with pytest.raises(
        SetupError, match=r"NeMo Gym needs CPython >= 3\.12.*uv python install 3\.13.*--python PATH"
    ):
        list(choose(None, FLOOR, print))


def test_named_version(home: Path) -> None:
    put(home, "3.12.1")
    path = put(home, "3.13.0")
    assert named_interpreter("3.13").path == path
    assert named_interpreter("3").path == path
    with pytest.raises(SetupError, match=r"no Python 3\.14 on this machine.*found: CPython 3\.13\.0"):
        named_interpreter("3.14")


def test_named_path(home: Path) -> None:
    old, new = put(home, "3.11.9"), put(home, "3.12.1")
    assert named_interpreter(str(new)).label == "3.12.1"
    with pytest.raises(SetupError, match=r"is CPython 3\.11\.9 .*needs CPython >= 3\.12"):
        named_interpreter(str(old))
    with pytest.raises(SetupError, match="'/no/python' does not exist"):
        named_interpreter("/no/python")
    with pytest.raises(SetupError, match="'/bin/ls' cannot be used: it is not Python"):
        named_interpreter("/bin/ls")
    broken(home / "shim", "echo 'pyenv: python: command not found' >&2; exit 127")
    with pytest.raises(SetupError, match="cannot be used: pyenv: python: command not found"):
        named_interpreter(str(home / "shim"))


def test_what_a_name_means(tmp_path: Path) -> None:
    path = tmp_path / "python3.13"
    path.touch()
    assert is_named(path, "3.13.1", "3.13")
    assert is_named(path, "3.13.1", "3.13.1")
    assert not is_named(path, "3.13.1", "3.1")
    assert not is_named(path, "3.13.14", "3.13.1")
    (tmp_path / "link").symlink_to(path)
    assert is_named(path, "3.13.1", str(tmp_path / "link"))
    assert not is_named(path, "3.13.1", "/no/python")


def test_behind_a_virtual_environment_is_its_base() -> None:
    found = interpreters.probe(sys.executable)
    assert found.path.resolve() == Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    assert found.version == sys.version_info[:3]


def test_interpreters_are_known_by_their_numbered_names_without_running_them(home: Path) -> None:
    older, first = put(home, "3.10.13"), put(home, "3.12.1")
    put(home, "3.12.7")
    assert numbered_commands() == {"python3.10": older, "python3.12": first}
