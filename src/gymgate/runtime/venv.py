"""Making a virtual environment once: built beside its place under a file lock, checked, then renamed into it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gymgate.errors import SetupError
from gymgate.runtime.environment import clean_env
from gymgate.runtime.installer import conflict_of, run_uv, versions
from gymgate.runtime.interpreters import Interpreter, Version

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]

MARKER = "gymgate.json"
CHECK = (
    "import nemo_gym.server_utils, nemo_gym.base_resources_server, nemo_gym.base_responses_api_agent, "
    "nemo_gym.base_responses_api_model"
)
"""What every server imports; run once to prove the environment, which also leaves its bytecode behind."""
_FACTS = (
    "import json, sys, sysconfig, importlib.metadata as m\n"
    "try: version = m.version('nemo-gym')\n"
    "except m.PackageNotFoundError: version = None\n"
    "print(json.dumps([sysconfig.get_paths()['purelib'], version, '.'.join(map(str, sys.version_info[:3]))]))"
)


@dataclass(frozen=True)
class Recipe:
    """What decides an environment's content, the interpreter apart."""

    version: str
    floor: Version
    """Python that the release declares as its minimum."""
    lock: str | None
    """Hash-pinned requirements; `None` for a release without a lock, which is resolved when it is installed."""
    requirements: tuple[str, ...]
    digest: str

    def name(self, interpreter: Interpreter) -> str:
        """Directory name of the environment made with `interpreter`."""
        return f"nemo-gym-{self.version}-py{interpreter.label}-{self.digest}"


@dataclass(frozen=True)
class Facts:
    """What an interpreter says of itself."""

    site: Path
    nemo_gym: str | None
    python: str


class UnusableInterpreterError(SetupError):
    """The environment was made, but NeMo Gym does not import on this interpreter."""


def inspect_interpreter(python: Path) -> Facts:
    """Ask an interpreter. `SetupError` if it does not run."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _FACTS],
            env=clean_env(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(f"interpreter {str(python)!r} does not run: {error}") from error
    site, version, own = json.loads(done.stdout)
    return Facts(Path(site), version, own)


def facts_of(path: Path) -> Facts | None:
    """What was noted when the environment at `path` was made; `None` if it is not complete, or its interpreter is gone."""
    try:
        noted = json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return None
    if not (path / "bin" / "python").exists():
        return None
    return Facts(path / noted["site"], noted["nemo_gym"], noted["python"])


def build(recipe: Recipe, interpreter: Interpreter, root: Path, say: Progress) -> Path:
    """The environment's directory, made if it is not there. Raises `SetupError`."""
    place = root / recipe.name(interpreter)
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{place.name}.lock", say):
            if facts_of(place) is not None:
                return place
            _remove(place, *root.glob(f"{place.name}.tmp-*"))
            unfinished = root / f"{place.name}.tmp-{os.getpid()}"
            try:
                _make(recipe, interpreter, unfinished, say)
                unfinished.rename(place)
            finally:
                _remove(unfinished)
    return place


def _make(recipe: Recipe, interpreter: Interpreter, path: Path, say: Progress) -> None:
    what = f"setting up nemo-gym {recipe.version}"
    with _step(say, f"making an environment for nemo-gym {recipe.version} with {interpreter}"):
        run_uv("venv", "--relocatable", "--python", interpreter.path, path, what=what)
    with _step(say, f"installing nemo-gym {recipe.version} (about 1 GB on disk)"):
        _install_release(recipe, interpreter, path, what)
    if recipe.requirements:
        with _step(say, f"installing {versions(recipe.requirements)}"):
            _install_requirements(recipe, path)
    with _step(say, "checking that NeMo Gym imports"):
        _check(path, interpreter)
    facts = inspect_interpreter(path / "bin" / "python")
    noted = {
        "site": os.path.relpath(facts.site, path),
        "nemo_gym": facts.nemo_gym,
        "python": facts.python,
        "requirements": list(recipe.requirements),
        "interpreter": {name: str(value) for name, value in asdict(interpreter).items()},
    }
    (path / MARKER).write_text(json.dumps(noted, indent=2))


def _install_release(recipe: Recipe, interpreter: Interpreter, path: Path, what: str) -> None:
    """Two steps where the interpreter is below the declared floor: everything else as it is, then nemo-gym, a pure Python
    wheel, as if for the floor. (An override of its metadata does not do: an index declares the floor too.)"""
    floor = ".".join(map(str, recipe.floor))
    below = interpreter.version < recipe.floor
    install = ("pip", "install", "--quiet", "--python", path / "bin" / "python")
    if recipe.lock is None:
        logger.warning("nemo-gym %s has no lock here; its requirements are resolved now", recipe.version)
        lifted = ("--python-version", floor) if below else ()
        run_uv(*install, *lifted, f"nemo-gym=={recipe.version}", what=what)
        return
    own, rest = split_lock(recipe.lock)
    with _temporary(rest) as others, _temporary(own) as release:
        run_uv(*install, "--no-deps", "--require-hashes", "-r", others, what=what)
        lifted = ("--python-version", floor) if below else ()
        run_uv(*install, "--no-deps", "--require-hashes", *lifted, "-r", release, what=what)


def _install_requirements(recipe: Recipe, path: Path) -> None:
    """With the release's own versions held where that is possible."""
    install = ("pip", "install", "--quiet", "--python", path / "bin" / "python")
    what = f"installing {', '.join(recipe.requirements)}"
    with (
        _temporary("\n".join(recipe.requirements)) as wanted,
        _temporary(constraints(recipe.lock or "")) as held,
    ):
        try:
            run_uv(*install, "-r", wanted, "-c", held, what=what)
        except SetupError as error:
            if not conflict_of(error):
                raise
            logger.warning(
                "requirements move versions that nemo-gym %s was locked with: %s", recipe.version, error
            )
            run_uv(*install, "-r", wanted, what=what)


def split_lock(lock: str) -> tuple[str, str]:
    """The entry of nemo-gym, and all others."""
    entries = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    own = [entry for entry in entries if entry.startswith("nemo-gym==")]
    return "".join(own), "".join(entry for entry in entries if not entry.startswith(("nemo-gym==", "#")))


def constraints(lock: str) -> str:
    """A lock's versions without their hashes, nemo-gym apart."""
    pins = re.findall(r"^([A-Za-z0-9][^\\\n]*?)\s*\\?$", lock, flags=re.MULTILINE)
    return "\n".join(pin for pin in pins if not pin.startswith("nemo-gym=="))


def _check(path: Path, interpreter: Interpreter) -> None:
    done = subprocess.run(
        [path / "bin" / "python", "-I", "-c", CHECK],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnusableInterpreterError(f"NeMo Gym does not import on {interpreter}: {reason}")


@contextlib.contextmanager
def _step(say: Progress, line: str, every_s: float = 10.0) -> Iterator[None]:
    """Say what is being done, and again how long it has taken, every `every_s` seconds."""
    done = threading.Event()
    started = time.monotonic()

    def remind() -> None:
        while not done.wait(every_s):
            say(f"still {line} ({time.monotonic() - started:.0f} s)")

    say(line)
    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    finally:
        done.set()
        reminder.join()


@contextlib.contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is making the same environment")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _temporary(text: str) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="gymgate-") as handle:
        handle.write(text)
        handle.flush()
        yield Path(handle.name)


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, SetupError):
            raise
        raise SetupError(
            f"cannot write under {root}: {error.strerror or error}; set GYMGATE_CACHE to another directory"
        ) from error


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
