"""Which interpreter is chosen: real ones behind a pyenv whose shims refuse to run, and lists as uv writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gymgate.core.errors import SetupError
from gymgate.gym.runtime import interpreters
from gymgate.gym.runtime.interpreters import (
    Interpreter,
    choose,
    find_interpreters,
    is_named,
    named_interpreter,
    numbered_commands,
)

pytestmark = pytest.mark.timeout(120)

FLOOR = (3, 13, 14)


@pytest.fixture(scope="module")
def real() -> Interpreter:
    """A CPython of this machine on which NeMo Gym runs."""
    found = find_interpreters()
    if not found:
        pytest.skip("no CPython >= 3.12 on this machine")
    return found[0]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose only interpreters are those put under the returned directory's pyenv; the network is off."""
    monkeypatch.setattr(interpreters, "_DIRECTORIES", ("{pyenv}/versions/*/bin", "{conda}/bin"))
    for name in ("PYENV_ROOT", "XDG_DATA_HOME", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CONDA_EXE", str(tmp_path / "conda" / "bin" / "conda"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setenv("GYMGATE_OFFLINE", "1")
    shim = tmp_path / "shims" / "python3"
    program(shim, "echo 'pyenv: python3: command not found' >&2; exit 127")
    return tmp_path


def program(path: Path, script: str = "exit 1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def installed(home: Path, real: Interpreter) -> Path:
    """Its path in pyenv, under a directory with a space in its name."""
    place = home / ".pyenv" / "versions" / f"{real.label} mine"
    place.parent.mkdir(parents=True)
    place.symlink_to(real.path.resolve().parents[1])
    return place / "bin" / real.path.name


def listed(monkeypatch: pytest.MonkeyPatch, *versions: str) -> None:
    """uv lists these; a version may have another implementation or variant in front."""

    def run_uv(*words: str | Path, **settings: object) -> str:
        entries = []
        for version in versions:
            kind, _, number = version.rpartition("-")
            entries.append(
                {
                    "version": number,
                    "path": f"/opt/{version}/bin/python",
                    "implementation": kind if kind == "pypy" else "cpython",
                    "variant": kind if kind == "freethreaded" else "default",
                }
            )
        return json.dumps(entries)

    monkeypatch.setattr(interpreters, "run_uv", run_uv)


@pytest.mark.parametrize(
    ("here", "order"),
    [
        (["3.12.1", "3.13.0"], ["3.13.0", "3.12.1"]),
        (["3.14.1", "3.12.1"], ["3.14.1", "3.12.1"]),
        (["3.13.20", "3.14.1", "3.13.0", "3.13.15"], ["3.13.20", "3.13.15", "3.14.1", "3.13.0"]),
        (["pypy-3.13.20", "freethreaded-3.13.20", "3.13.20rc1", "3.12.1"], ["3.12.1"]),
    ],
)
def test_order(home: Path, monkeypatch: pytest.MonkeyPatch, here: list[str], order: list[str]) -> None:
    """Those that meet the minimum first; 3.13 before 3.12, then 3.14; only released CPythons with the GIL."""
    listed(monkeypatch, *here)
    assert [found.label for found in choose(None, FLOOR, print)] == order


def test_pyenvs_inactive_interpreter_is_found_past_its_shims(home: Path, real: Interpreter) -> None:
    path = installed(home, real)
    program(home / ".pyenv" / "versions" / "broken" / "bin" / "python3.13")
    assert find_interpreters() == [Interpreter(path, real.version)]
    assert list(choose(None, FLOOR, print)) == [Interpreter(path, real.version)]
    assert named_interpreter(f"3.{real.version[1]}").path == path
    assert named_interpreter("3").path == path


def test_none_at_all_says_how_to_get_one(home: Path) -> None:
    with pytest.raises(SetupError, match=r"uv python install 3\.13.*--python PATH"):
        list(choose(None, FLOOR, print))


def test_a_named_version_that_is_not_here(home: Path, real: Interpreter) -> None:
    path = installed(home, real)
    with pytest.raises(SetupError, match=r"3\.99") as caught:
        named_interpreter("3.99")
    assert str(path) in str(caught.value)


def test_a_named_path(home: Path, real: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    path = installed(home, real)
    assert named_interpreter(str(path)) == Interpreter(path, real.version)
    monkeypatch.chdir(path.parent)
    assert named_interpreter(f"./{path.name}").path.samefile(path)
    for name in ("/no/python", "nosuchpython", "/bin/ls", str(home / "shims" / "python3")):
        with pytest.raises(SetupError, match=name):
            named_interpreter(name)


def test_a_named_python_that_is_too_old(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch, "3.11.9")
    with pytest.raises(SetupError, match=r"/my/python.*3\.11\.9"):
        named_interpreter("/my/python")


def test_what_a_name_means(tmp_path: Path) -> None:
    path = tmp_path / "python3.13"
    path.touch()
    assert is_named(Interpreter(path, (3, 13, 1)), "3.13")
    assert is_named(Interpreter(path, (3, 13, 1)), "3.13.1")
    assert not is_named(Interpreter(path, (3, 13, 1)), "3.1")
    assert not is_named(Interpreter(path, (3, 13, 14)), "3.13.1")
    (tmp_path / "link").symlink_to(path)
    assert is_named(Interpreter(path, (3, 13, 1)), str(tmp_path / "link"))
    assert not is_named(Interpreter(path, (3, 13, 1)), "/no/python")


def test_a_virtual_environments_interpreter_has_its_bases_version() -> None:
    [found] = find_interpreters(sys.executable)
    assert found.version == sys.version_info[:3]


def test_interpreters_are_known_by_their_numbered_names_without_running_them(home: Path) -> None:
    versions = home / ".pyenv" / "versions"
    older = program(versions / "3.10.13" / "bin" / "python3.10")
    first = program(versions / "3.12.1" / "bin" / "python3.12")
    program(versions / "3.12.7" / "bin" / "python3.12")
    assert numbered_commands() == {"python3.10": older, "python3.12": first}
