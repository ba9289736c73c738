"""Find a CPython that NeMo Gym can run on."""

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
from gymgate.runtime.command import CommandError, Progress, run_command
from gymgate.runtime.environment import clean_env, offline
from gymgate.runtime.installer import UvFailedError, run_uv

Version = tuple[int, int, int]

MINIMUM: Version = (3, 12, 0)
"""No supported release runs on an older Python, whatever it declares."""
_PREFERRED = (13, 12, 14)
"""Minor versions to try unless one is named, best first."""
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
    "/home/linuxbrew/.linuxbrew/bin",
    "{conda}/bin",
    "{conda}/envs/*/bin",
    "{home}/*conda*/bin",
    "{home}/*forge*/bin",
    "{home}/*conda*/envs/*/bin",
    "{home}/*forge*/envs/*/bin",
    "/opt/*conda*/envs/*/bin",
)
_NAMES = (*(f"python3.{minor}" for minor in _PREFERRED), "python3", "python")
_VERSION = re.compile(r"3(\.\d+){0,2}")
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
    """A CPython that runs. For a virtual environment's interpreter, this is the base interpreter."""

    path: Path
    version: Version

    @property
    def label(self) -> str:
        """`3.13.0`"""
        return text(self.version)

    def __str__(self) -> str:
        return f"CPython {self.label} at {self.path}"


class NotUsableError(Exception):
    """The program at a path does not run, or is not a CPython for which wheels are published; the message says which."""


def text(version: Version) -> str:
    """`(3, 13, 14)` as `3.13.14`."""
    return ".".join(map(str, version))


def probe(path: str | os.PathLike[str]) -> Interpreter:
    """Run the interpreter at `path` and return what it says of itself. Raises `NotUsableError`."""
    try:
        answer = json.loads(
            run_command([path, "-I", "-c", _PROBE], env=clean_env(), timeout_s=_PROBE_TIMEOUT_S)
        )
    except CommandError as error:
        raise NotUsableError(_complaint(error)) from error
    except ValueError as error:
        raise NotUsableError("it is not Python") from error
    major, minor, patch = answer["version"]
    if answer["implementation"] != "CPython" or not (answer["final"] and answer["wide"] and answer["gil"]):
        raise NotUsableError("it is not a released 64-bit CPython with the GIL")
    base = Path(answer["base"]) / "bin" / f"python{major}.{minor}"
    return Interpreter(base if base.exists() else Path(answer["executable"]), (major, minor, patch))


def choose(name: str | None, floor: Version, progress: Progress) -> Iterator[Interpreter]:
    """Interpreters to try, best first: those on this machine from `floor` on, one that uv downloads, then older ones.

    Only the named one (a path, a command or a version) if `name` is given. Raises `SetupError` if there is none.
    """
    if name is not None:
        yield named_interpreter(name, progress)
        return
    found = sorted(find_interpreters(), key=_rank)
    fitting = [each for each in found if each.version >= floor]
    if not fitting and (fetched := download(f">={text(floor)},<3.14", progress)) is not None:
        fitting = [fetched]
    yield from fitting
    yield from (each for each in found if each not in fitting)
    if not found and not fitting:
        raise SetupError(
            "NeMo Gym needs CPython >= 3.12, and there is none on this machine. Install one (`uv python install 3.13`, "
            "`pyenv install 3.13`, `conda create -n py313 python=3.13`, or your system's package), "
            "or name one with --python PATH"
        )


def named_interpreter(name: str, progress: Progress | None = None) -> Interpreter:
    """Return the interpreter at the path `name`, of that command, or of that version (`3.13`). Raises `SetupError`."""
    if _VERSION.fullmatch(name):
        found = _of_version(name, progress)
    elif (path := _located(name)) is None:
        raise SetupError(f"python {name!r} does not exist; name the path of a CPython >= 3.12, or a version")
    else:
        try:
            found = probe(path)
        except NotUsableError as error:
            raise SetupError(f"python {name!r} cannot be used: {error}") from error
    if found.version < MINIMUM:
        raise SetupError(f"python {name!r} is {found}; NeMo Gym needs CPython >= 3.12")
    return found


def is_named(path: Path, version: str, name: str) -> bool:
    """Return whether `name` means the interpreter of this version at `path`; runs nothing."""
    if _VERSION.fullmatch(name):
        return f"{version}.".startswith(f"{name}.")
    located = _located(name)
    return located is not None and located.resolve() == path.resolve()


def find_interpreters() -> list[Interpreter]:
    """Return every CPython 3.12 to 3.14 on this machine that runs, newest first.

    `uv python list` does not do: of pyenv's interpreters it sees only the selected one, it runs pyenv's shims, and it
    has no time limit for a program that hangs.
    """
    found: dict[Path, Interpreter] = {}
    with ThreadPoolExecutor(8) as pool:
        for interpreter in pool.map(_usable, _candidates()):
            if interpreter is not None and interpreter.version[1] in _PREFERRED:
                found.setdefault(interpreter.path.resolve(), interpreter)
    return sorted(found.values(), key=lambda each: each.version, reverse=True)


def numbered_commands() -> dict[str, Path]:
    """Return `python3.10` and the like with the first path of each on this machine; runs nothing."""
    found: dict[str, Path] = {}
    for directory in _directories():
        for path in sorted(directory.glob("python3.*")):
            if re.fullmatch(r"python3\.\d+", path.name) and os.access(path, os.X_OK):
                found.setdefault(path.name, path)
    return found


def download(request: str, progress: Progress | None = None) -> Interpreter | None:
    """Let uv download an interpreter into its own directory; `None` if it cannot, or downloads are switched off."""
    if offline() or os.environ.get("UV_PYTHON_DOWNLOADS", "").lower() in ("never", "false", "0"):
        return None
    if progress is not None:
        progress(f"no CPython {request} on this machine; asking uv to download one")
    quick = {"UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "5", "UV_PYTHON_INSTALL_BIN": "0"}
    try:
        run_uv(
            "python", "install", request, progress=progress, timeout_s=_DOWNLOAD_TIMEOUT_S, variables=quick
        )
        path = run_uv("python", "find", "--managed-python", "--no-python-downloads", request, timeout_s=60)
        return probe(path.strip())
    except (UvFailedError, SetupError, NotUsableError):
        return None


def _complaint(error: CommandError) -> str:
    """Why a program is not usable, on one short line: the end of its traceback, or the first line of its stderr."""
    lines = error.errors.strip().splitlines()
    if "import sys" in error.errors:
        return "it is not Python"
    if not lines:
        return str(error)
    return (error.last_line if lines[0].startswith("Traceback") else lines[0])[:100]


def _rank(interpreter: Interpreter) -> tuple[int, int]:
    return _PREFERRED.index(interpreter.version[1]), -interpreter.version[2]


def _of_version(name: str, progress: Progress | None) -> Interpreter:
    here = find_interpreters()
    if matching := [each for each in here if f"{each.label}.".startswith(f"{name}.")]:
        return min(matching, key=_rank)
    command = shutil.which(f"python{name}")
    if command is not None and (found := _usable(Path(command))) is not None:
        return found
    if (fetched := download(name, progress)) is not None:
        return fetched
    found_here = ", ".join(map(str, here)) or "no CPython >= 3.12"
    raise SetupError(f"no Python {name} on this machine, and uv could not download it; found: {found_here}")


def _located(name: str) -> Path | None:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "bin" / "python3"
    if path.is_file():
        return path.absolute()
    found = None if os.sep in name else shutil.which(name)
    return Path(found) if found else None


def _usable(path: Path) -> Interpreter | None:
    try:
        return probe(path)
    except NotUsableError:
        return None


def _candidates() -> Iterator[Path]:
    """Programs to try, each file once, without those whose names say that they are another version."""
    seen: set[Path] = set()
    for directory in _directories():
        for name in _NAMES:
            path = directory / name
            real = path.resolve()
            numbered = re.fullmatch(r"python(\d\.\d+)t?", real.name)
            if numbered and numbered[1] not in {f"3.{minor}" for minor in _PREFERRED}:
                continue
            if real not in seen and os.access(path, os.X_OK):
                seen.add(real)
                yield path


def _directories() -> Iterator[Path]:
    """The directories on PATH, then the usual ones.

    Directories of version managers' shims are left out: a shim may refuse to run, and its interpreters are found anyway.
    """
    for entry in os.environ.get("PATH", "").split(os.pathsep):
        if entry and Path(entry).name != "shims":
            yield Path(entry)
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    conda_program = Path(os.environ.get("CONDA_EXE") or "/opt/conda/bin/conda")
    roots = {
        "home": home,
        "pyenv": os.environ.get("PYENV_ROOT") or home / ".pyenv",
        "uv": os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python",
        "conda": os.environ.get("CONDA_ROOT") or conda_program.parents[1],
    }
    for pattern in _DIRECTORIES:
        yield from sorted(Path("/").glob(pattern.format(**roots).lstrip("/")))
