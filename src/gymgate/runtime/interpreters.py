"""Finding a CPython that NeMo Gym can run on."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gymgate.errors import SetupError
from gymgate.runtime.command import CommandError, run_command
from gymgate.runtime.environment import clean_env, offline
from gymgate.runtime.installer import Progress, UvFailedError, run_uv

Version = tuple[int, int, int]

MINIMUM: Version = (3, 12, 0)
"""Below this no supported release runs, whatever it declares."""
_PREFERRED = (13, 12, 14)
"""Minor versions that are considered unless one is named, best first."""
_DIRECTORIES = (
    "{pyenv}/versions/*/bin",
    "{uv}/*/bin",
    "{home}/.local/bin",
    "{home}/.asdf/installs/python/*/bin",
    "{home}/.local/share/mise/installs/python/*/bin",
    "{home}/.rye/py/*/bin",
    "/opt/python/*/bin",
    "/opt/hostedtoolcache/Python/*/*/bin",
    "/opt/*/bin",
    "/usr/local/bin",
    "/usr/local/opt/python@3.*/bin",
    "/usr/local/python*/bin",
    "/usr/bin",
    "/opt/homebrew/bin",
    "/home/linuxbrew/.linuxbrew/bin",
    "/Library/Frameworks/Python.framework/Versions/*/bin",
    "{conda}/bin",
    "{conda}/envs/*/bin",
    "{home}/*conda*/bin",
    "{home}/*forge*/bin",
    "{home}/*conda*/envs/*/bin",
    "{home}/*forge*/envs/*/bin",
    "/opt/*conda*/envs/*/bin",
)
_NAMES = (*(f"python3.{minor}" for minor in _PREFERRED), "python3", "python")
_PROBE_TIMEOUT_S = 20.0
_DOWNLOAD_TIMEOUT_S = 300.0
_PROBE = (
    "import sys, json, platform, sysconfig, ssl, zlib, ctypes\n"
    "print(json.dumps(dict(implementation=platform.python_implementation(), version=sys.version_info[:3],"
    " final=sys.version_info.releaselevel == 'final', wide=sys.maxsize > 2**32,"
    " gil=not sysconfig.get_config_var('Py_GIL_DISABLED'), base=sys.base_prefix, executable=sys.executable)))"
)


@dataclass(frozen=True)
class Interpreter:
    """A CPython that answered; never a virtual environment's, but the one behind it."""

    path: Path
    version: Version

    @property
    def label(self) -> str:
        """`3.13.0`"""
        return text(self.version)

    def __str__(self) -> str:
        return f"CPython {self.label} at {self.path}"


class NotUsableError(Exception):
    """What is at a path does not run, or is no CPython that packages are built for; says which."""


def text(version: Version) -> str:
    """`3.13.14`; a trailing zero patch of a declared minimum is kept."""
    return ".".join(map(str, version))


def probe(path: str | os.PathLike[str]) -> Interpreter:
    """The interpreter at `path`, by running it. Raises `NotUsableError`."""
    try:
        answer = json.loads(
            run_command([path, "-I", "-c", _PROBE], env=clean_env(), timeout_s=_PROBE_TIMEOUT_S)
        )
    except CommandError as error:
        raise NotUsableError(_complaint(error.errors) or str(error)) from error
    except ValueError as error:
        raise NotUsableError("it is no Python") from error
    major, minor, patch = answer["version"]
    if answer["implementation"] != "CPython" or not (answer["final"] and answer["wide"] and answer["gil"]):
        raise NotUsableError("it is not a released 64-bit CPython with the GIL")
    own = Path(answer["base"]) / "bin" / f"python{major}.{minor}"
    return Interpreter(own if own.exists() else Path(answer["executable"]), (major, minor, patch))


def choose(name: str | None, floor: Version, say: Progress) -> Iterator[Interpreter]:
    """Interpreters to try, best first: those on this machine that meet `floor`, one that uv downloads, the others.

    Only the named one (a path, a command, a version) if one is named. Raises `SetupError` if there is none.
    """
    if name is not None:
        yield named_interpreter(name, say)
        return
    found = sorted(find_interpreters(), key=_rank)
    fitting = [each for each in found if each.version >= floor]
    yield from fitting
    if not fitting and (fetched := download(f">={text(floor)},<3.14", say)) is not None:
        yield fetched
        fitting = [fetched]
    yield from (each for each in found if each not in fitting)
    if not found and not fitting:
        raise SetupError(
            "no CPython >= 3.12 found for NeMo Gym; install one "
            "(`uv python install 3.13`, `pyenv install 3.13`, `conda create -n py313 python=3.13`, or your system's "
            "packages), or name one with --python PATH"
        )


def named_interpreter(name: str, say: Progress | None = None) -> Interpreter:
    """The interpreter the caller named: a path, a command, or a version such as `3.13`. Raises `SetupError`."""
    found = _of_version(name, say) if re.fullmatch(r"3(\.\d+){0,2}", name) else _at_path(name)
    if found.version < MINIMUM:
        raise SetupError(f"python {name!r} is {found}; NeMo Gym needs CPython >= 3.12")
    return found


def is_named(path: Path, version: str, name: str) -> bool:
    """Whether the interpreter at `path` is what `name` means; runs nothing."""
    if re.fullmatch(r"3(\.\d+){0,2}", name):
        return f"{version}.".startswith(f"{name}.")
    located = _located(name)
    return located is not None and located.resolve() == path.resolve()


def find_interpreters() -> list[Interpreter]:
    """Every CPython 3.12 to 3.14 on this machine that answers when it is run, newest first."""
    found: dict[Path, Interpreter] = {}
    with ThreadPoolExecutor(8) as pool:
        for interpreter in pool.map(_probe_quietly, _candidates()):
            if interpreter is not None and interpreter.version[1] in _PREFERRED:
                found.setdefault(interpreter.path.resolve(), interpreter)
    return sorted(found.values(), key=lambda each: each.version, reverse=True)


def numbered_commands() -> dict[str, Path]:
    """`python3.10` and its like where interpreters are kept, the first of each name; none is run."""
    found: dict[str, Path] = {}
    for directory in _directories():
        for path in sorted(directory.glob("python3.*")):
            if re.fullmatch(r"python3\.\d+", path.name) and os.access(path, os.X_OK):
                found.setdefault(path.name, path)
    return found


def download(request: str, say: Progress | None = None) -> Interpreter | None:
    """An interpreter that uv fetches into its own directory; `None`, at once, where it cannot or may not."""
    if offline() or os.environ.get("UV_PYTHON_DOWNLOADS", "").lower() in ("never", "false", "0"):
        return None
    if say is not None:
        say(f"no CPython {request} on this machine; asking uv to download one")
    quick = {"UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "5", "UV_PYTHON_INSTALL_BIN": "0"}
    try:
        run_uv("python", "install", request, say=say, timeout_s=_DOWNLOAD_TIMEOUT_S, variables=quick)
        path = run_uv(
            "python", "find", "--managed-python", "--no-python-downloads", request, timeout_s=60
        ).strip()
        return probe(path)
    except (UvFailedError, SetupError, NotUsableError):
        return None


def _complaint(output: str) -> str:
    """What a program said on stderr, on one short line: a traceback's end, or else the first line."""
    if "import sys" in output:
        return "it is no Python"
    lines = output.strip().splitlines() or [""]
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0])[:100]


def _rank(each: Interpreter) -> tuple[int, int]:
    return _PREFERRED.index(each.version[1]), -each.version[2]


def _of_version(name: str, say: Progress | None) -> Interpreter:
    matching = [each for each in find_interpreters() if f"{each.label}.".startswith(f"{name}.")]
    if matching:
        return min(matching, key=_rank)
    on_path = shutil.which(f"python{name}")
    if on_path is not None and (answered := _probe_quietly(Path(on_path))) is not None:
        return answered
    if (fetched := download(name, say)) is not None:
        return fetched
    here = ", ".join(str(each) for each in find_interpreters()) or "no CPython >= 3.12"
    raise SetupError(f"no Python {name} on this machine, and uv could not download it; found: {here}")


def _at_path(name: str) -> Interpreter:
    located = _located(name)
    if located is None:
        raise SetupError(f"python {name!r} does not exist; name the path of a CPython >= 3.12, or a version")
    try:
        return probe(located)
    except NotUsableError as error:
        raise SetupError(f"python {name!r} cannot be used: {error}") from error


def _located(name: str) -> Path | None:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "bin" / "python3"
    if path.is_file():
        return path.absolute()
    found = None if os.sep in name else shutil.which(name)
    return Path(found) if found else None


def _probe_quietly(path: Path) -> Interpreter | None:
    try:
        return probe(path)
    except NotUsableError:
        return None


def _candidates() -> Iterator[Path]:
    """Programs to try: those on PATH, then those in the usual places; each file once.

    Version managers' shims are left out: they need not resolve, and what they stand for is found by itself.
    """
    seen: set[Path] = set()
    for directory in _directories():
        for name in _NAMES:
            path = directory / name
            real = path.resolve()
            if real not in seen and os.access(path, os.X_OK) and not _other_minor(real):
                seen.add(real)
                yield path


def _directories() -> Iterator[Path]:
    for entry in os.environ.get("PATH", "").split(os.pathsep):
        if entry and Path(entry).name != "shims":
            yield Path(entry)
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    places = {
        "home": home,
        "pyenv": os.environ.get("PYENV_ROOT") or home / ".pyenv",
        "uv": os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python",
        "conda": os.environ.get("CONDA_ROOT")
        or Path(os.environ.get("CONDA_EXE") or "/opt/conda/bin/conda").parents[1],
    }
    for pattern in _DIRECTORIES:
        yield from sorted(Path("/").glob(pattern.format(**places).lstrip("/")))


def _other_minor(path: Path) -> bool:
    """Whether the name says that it is a minor version that is not considered."""
    numbered = re.fullmatch(r"python(\d)(?:\.(\d+))?t?", path.name)
    return (
        numbered is not None
        and numbered[2] is not None
        and (int(numbered[1]), int(numbered[2])) not in {(3, minor) for minor in _PREFERRED}
    )
