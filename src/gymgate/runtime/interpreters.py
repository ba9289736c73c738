"""Finding a CPython that NeMo Gym can run on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gymgate.errors import SetupError
from gymgate.runtime.environment import installer_env

Version = tuple[int, int, int]

MINIMUM: Version = (3, 12, 0)
"""Below this no supported release runs, whatever it declares."""
_PREFERRED = (13, 12, 14)
"""Minor versions in the order they are tried when none meets the declared floor."""
_PLACES = (
    "{home}/.pyenv/versions/*/bin/python3",
    "{home}/.local/share/uv/python/*/bin/python3",
    "{home}/.local/bin/python3.*",
    "{home}/*conda*/envs/*/bin/python3",
    "{home}/*conda*/bin/python3",
    "{home}/.asdf/installs/python/*/bin/python3",
    "{home}/.local/share/mise/installs/python/*/bin/python3",
    "/opt/*/bin/python3",
    "/opt/python/*/bin/python3",
    "/usr/local/bin/python3.*",
    "/usr/bin/python3.*",
    "/opt/homebrew/bin/python3.*",
)
_PROBE = (
    "import sys, json, platform, venv;"
    "print(json.dumps([platform.python_implementation(), list(sys.version_info[:3]), sys.base_prefix, sys.executable]))"
)


@dataclass(frozen=True)
class Interpreter:
    """A CPython that answered."""

    path: Path
    version: Version

    @property
    def label(self) -> str:
        """`3.13.0`"""
        return ".".join(map(str, self.version))

    def __str__(self) -> str:
        return f"CPython {self.label} at {self.path}"


def probe(path: str | os.PathLike[str]) -> Interpreter | None:
    """The interpreter at `path`, by running it; `None` if it does not run, is no CPython, or is a virtual environment's."""
    try:
        done = subprocess.run(
            [os.fspath(path), "-I", "-c", _PROBE],
            env=installer_env(),
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        implementation, version, base, executable = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if implementation != "CPython":
        return None
    own = Path(base) / "bin" / f"python{version[0]}.{version[1]}"
    return Interpreter(own if own.exists() else Path(executable), (version[0], version[1], version[2]))


def named_interpreter(name: str) -> Interpreter:
    """The interpreter the caller named: a path, a command, or a version such as `3.13`. Raises `SetupError`."""
    candidates = [name, f"python{name}"]
    found = next((interpreter for word in candidates if (interpreter := probe(word))), None)
    if found is None:
        matching = [each for each in find_interpreters() if ".".join(map(str, each.version)).startswith(name)]
        found = matching[0] if matching else None
    if found is None:
        raise SetupError(f"python {name!r} does not run here; name the path of a CPython >= 3.12")
    if found.version < MINIMUM:
        raise SetupError(f"python {name!r} is {found}; NeMo Gym needs CPython >= 3.12")
    return found


def find_interpreters() -> list[Interpreter]:
    """Every CPython >= 3.12 on this machine, newest patch release first within each minor version."""
    found: dict[Path, Interpreter] = {}
    for candidate in _candidates():
        interpreter = probe(candidate)
        if interpreter is not None and interpreter.version >= MINIMUM:
            found.setdefault(interpreter.path.resolve(), interpreter)
    return sorted(found.values(), key=lambda each: each.version, reverse=True)


def by_preference(interpreters: list[Interpreter], floor: Version) -> list[Interpreter]:
    """Those that meet `floor` first, then by how likely NeMo Gym is to run on them."""

    def rank(each: Interpreter) -> tuple[bool, int, int]:
        minor = each.version[1]
        order = _PREFERRED.index(minor) if minor in _PREFERRED else len(_PREFERRED)
        return each.version < floor, order, -each.version[2]

    return sorted(interpreters, key=rank)


def _candidates() -> Iterator[Path]:
    """Paths to try: commands on PATH that resolve outside of version managers' shims, then the usual places."""
    seen: set[Path] = set()
    for path in _named_on_path():
        if path.resolve() not in seen:
            seen.add(path.resolve())
            yield path
    patterns = [pattern.format(home=Path.home()) for pattern in _PLACES]
    if root := os.environ.get("PYENV_ROOT"):
        patterns.insert(0, f"{root}/versions/*/bin/python3")
    for pattern in patterns:
        for path in sorted(Path("/").glob(pattern.removeprefix("/"))):
            if os.access(path, os.X_OK) and "-config" not in path.name and path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _named_on_path() -> Iterator[Path]:
    for command in ("python3.13", "python3.12", "python3.14", "python3", "python"):
        found = shutil.which(command)
        if found and "shims" not in Path(found).parts:
            yield Path(found)
