"""Find a CPython that NeMo Gym can run on, with uv."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gymgate.core import codec
from gymgate.core.errors import SetupError
from gymgate.gym.runtime.command import Progress
from gymgate.gym.runtime.uv import UvFailedError, run_uv
from gymgate.gym.runtime.variables import clean_env, offline

Version = tuple[int, int, int]

MINIMUM: Version = (3, 12, 0)
"""No supported release runs on an older Python, whatever it declares."""
_SUPPORTED = ">=3.12,<3.15"
_PREFERRED = (13, 12, 14)
"""Minor versions, best first."""
_DIRECTORIES = (
    "{pyenv}/versions/*/bin",
    "{home}/.asdf/installs/python/*/bin",
    "{data}/mise/installs/python/*/bin",
    "{conda}/bin",
    "{conda}/envs/*/bin",
    "{home}/*conda*/bin",
    "{home}/*conda*/envs/*/bin",
    "{home}/*forge*/bin",
    "{home}/*forge*/envs/*/bin",
    "/opt/*/bin",
    "/opt/python/*/bin",
    "/usr/local/bin",
    "/usr/bin",
)
"""Where version managers keep interpreters, and where they are on a `PATH` that lacks the usual entries."""
_VERSION = re.compile(r"3(\.\d+){0,2}")
_RELEASED = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_LIST_TIMEOUT_S = 60.0
"""For uv to run every interpreter that it does not know yet; on a network file system each takes a second."""
_DOWNLOAD_TIMEOUT_S = 300.0
"""For 30 MB; without them an older interpreter may do."""


@dataclass(frozen=True)
class Interpreter:
    """A CPython on this machine."""

    path: Path
    version: Version

    @property
    def label(self) -> str:
        """`3.13.0`"""
        return text(self.version)

    def __str__(self) -> str:
        return f"CPython {self.label} at {self.path}"


def text(version: Version) -> str:
    """`(3, 13, 14)` as `3.13.14`."""
    return ".".join(map(str, version))


def find_interpreters(request: str = _SUPPORTED) -> list[Interpreter]:
    """Return the released CPythons with the GIL that fit uv's `request` (versions, a path or a command), best first.

    uv knows its own and those on `PATH`. It runs every program that it finds there, and a version manager's shim refuses
    to run, or runs another version: so it gets a `PATH` with the version managers' interpreters, without shims. Raises
    `SetupError`.
    """
    try:
        words = ("list", request, "--only-installed", "--no-python-downloads", "--output-format", "json")
        listed = _run_uv(*words)
    except UvFailedError as error:
        raise SetupError(
            f"uv cannot list this machine's interpreters: {error}; give one with --python PATH"
        ) from error
    interpreters: dict[Path, Interpreter] = {}
    for entry in codec.loads(listed.encode()):
        release = _RELEASED.fullmatch(entry["version"])
        if release and (entry["implementation"], entry["variant"]) == ("cpython", "default"):
            path, (major, minor, patch) = Path(entry["path"]), map(int, release.groups())
            interpreters.setdefault(path.resolve(), Interpreter(path, (major, minor, patch)))
    return sorted(interpreters.values(), key=_rank)


def choose(name: str | None, floor: Version, progress: Progress) -> Iterator[Interpreter]:
    """Interpreters to try, best first: those on this machine from `floor` on, one that uv downloads, then older ones.

    Only the named one (a path, a command or a version) if `name` is given. Raises `SetupError` if there is none.
    """
    if name is not None:
        yield named_interpreter(name, progress)
        return
    interpreters = find_interpreters()
    fitting = [interpreter for interpreter in interpreters if interpreter.version >= floor]
    fitting = fitting or download(f">={text(floor)},<3.14", progress)[:1]
    yield from fitting
    yield from (interpreter for interpreter in interpreters if interpreter not in fitting)
    if not interpreters and not fitting:
        raise SetupError(
            "NeMo Gym needs CPython >= 3.12, and there is none on this machine. Install one (`uv python install 3.13`, "
            "`pyenv install 3.13`, `conda create -n py313 python=3.13`, or your system's package), "
            "or give one with --python PATH"
        )


def named_interpreter(name: str, progress: Progress = lambda _: None) -> Interpreter:
    """Return the interpreter at the path `name`, of that command, or of that version (`3.13`). Raises `SetupError`."""
    is_version, path = _VERSION.fullmatch(name) is not None, Path(name).expanduser()
    request = str(path.absolute()) if path.exists() and not is_version else name
    interpreters = find_interpreters(request) or (download(name, progress) if is_version else [])
    if not interpreters and is_version:
        here = ", ".join(map(str, find_interpreters())) or "no CPython >= 3.12"
        raise SetupError(f"no Python {name} on this machine, and uv could not download it; found: {here}")
    if not interpreters:
        raise SetupError(f"python {name!r} cannot be used: {_why_not(request)}")
    if interpreters[0].version < MINIMUM:
        raise SetupError(f"python {name!r} is {interpreters[0]}; NeMo Gym needs CPython >= 3.12")
    return interpreters[0]


def is_named(interpreter: Interpreter, name: str) -> bool:
    """Return whether `name` means this interpreter; runs nothing."""
    if _VERSION.fullmatch(name):
        return f"{interpreter.label}.".startswith(f"{name}.")
    return Path(shutil.which(name) or name).expanduser().resolve() == interpreter.path.resolve()


def numbered_commands() -> dict[str, Path]:
    """Return `python3.10` and the like with the first path of each on this machine; runs nothing."""
    commands: dict[str, Path] = {}
    for directory in _directories():
        for path in sorted(directory.glob("python3.*")):
            if re.fullmatch(r"python3\.\d+", path.name) and os.access(path, os.X_OK):
                commands.setdefault(path.name, path)
    return commands


def download(request: str, progress: Progress) -> list[Interpreter]:
    """Let uv download an interpreter into its own directory; return those that fit, none if uv cannot or may not."""
    if offline():
        return []
    progress(f"no CPython {request} on this machine; asking uv to download one")
    quick = {"UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "5", "UV_PYTHON_INSTALL_BIN": "0"}
    try:
        run_uv(
            "python", "install", request, progress=progress, timeout_s=_DOWNLOAD_TIMEOUT_S, variables=quick
        )
    except UvFailedError:
        return []
    return find_interpreters(request)


def _run_uv(*words: str) -> str:
    path = os.pathsep.join(map(str, _directories()))
    return run_uv("python", *words, timeout_s=_LIST_TIMEOUT_S, variables={"PATH": path})


def _why_not(request: str) -> str:
    try:
        return f"{_run_uv('find', '--system', '--no-python-downloads', request).strip()} is no released CPython with the GIL"
    except UvFailedError as error:
        return str(error)


def _rank(interpreter: Interpreter) -> tuple[int, int]:
    """Sort key: the preferred minor versions, then the others; newer patches first."""
    _, minor, patch = interpreter.version
    return _PREFERRED.index(minor) if minor in _PREFERRED else len(_PREFERRED), -patch


def _directories() -> Iterator[Path]:
    """The directories on `PATH` without those of shims, then the usual ones that have an interpreter."""
    for entry in clean_env().get("PATH", "").split(os.pathsep):
        if entry and Path(entry).name != "shims":
            yield Path(entry)
    home = Path.home()
    roots = {
        "home": home,
        "data": os.environ.get("XDG_DATA_HOME") or home / ".local" / "share",
        "pyenv": os.environ.get("PYENV_ROOT") or home / ".pyenv",
        "conda": Path(os.environ.get("CONDA_EXE") or "/opt/conda/bin/conda").parents[1],
    }
    for pattern in _DIRECTORIES:
        yield from sorted(Path("/").glob(pattern.format(**roots).lstrip("/")))
