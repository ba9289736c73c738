"""What is put into NeMo Gym's environment: the release, pinned by its lock, then what servers require beside it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.errors import SetupError
from gymgate.runtime.command import CommandError, run_command
from gymgate.runtime.environment import clean_env
from gymgate.runtime.installer import Progress, UvFailedError, run_uv
from gymgate.runtime.interpreters import Interpreter, Version, text
from gymgate.runtime.lockfile import package_of, pins, split_lock
from gymgate.runtime.venv import noted_interpreter

_CHECK_TIMEOUT_S = 300.0
_FACTS_TIMEOUT_S = 60.0
_REMIND_S = 10.0
_NO_BUILD = re.compile(
    r"no wheels|no usable wheels|matching Python|Failed to build|depends on Python|satisfy Python"
)
"""uv's words for a package that this interpreter, rather than the index or the network, stands in the way of."""
_CHECK = (
    "import importlib, pkgutil, nemo_gym\n"
    "names = sorted(m.name for m in pkgutil.iter_modules(nemo_gym.__path__) if m.name.startswith('base_'))\n"
    "for name in ['server_utils', *names]: importlib.import_module('nemo_gym.' + name)\n"
)
"""What every server imports. Run once, it proves the environment and leaves behind the bytecode that a start needs (3 s
of imports instead of 6). Compiling all 16,000 files would add 28 s of CPU time."""
_FACTS = (
    "import importlib.metadata, importlib.util, json, os, sys\n"
    "try: version = importlib.metadata.version('nemo-gym')\n"
    "except importlib.metadata.PackageNotFoundError: version = None\n"
    "spec = importlib.util.find_spec('nemo_gym')\n"
    "site = os.path.dirname(list(spec.submodule_search_locations)[0]) if spec else None\n"
    "print(json.dumps([site, version, '.'.join(map(str, sys.version_info[:3]))]))"
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


class UnusableInterpreterError(Exception):
    """The release cannot be installed for this interpreter, or does not import on it; another may do."""


def make_environment(
    recipe: Recipe, interpreter: Interpreter, base: Path | None, say: Progress, path: Path, held: int
) -> dict[str, Any]:
    """Make it at `path`, prove that it works, and return what to note of it.

    `base` is the package directory of the same release without further requirements, whose bytecode is shared.
    Raises `UnusableInterpreterError`, `UvFailedError`, `SetupError`.
    """
    with _step(say, f"making an environment for nemo-gym {recipe.version} with {interpreter}"):
        run_uv("venv", "--clear", "--relocatable", "--python", interpreter.path, path, held=held)
    installation = _Installation(recipe, interpreter, path, held, say)
    with _step(say, f"installing nemo-gym {recipe.version} (about 1 GB on disk)"):
        installation.install_release()
    if recipe.requirements:
        with _step(say, f"installing {', '.join(recipe.requirements)}"):
            installation.install_requirements()
    with _step(say, "checking that NeMo Gym imports"):
        if base is not None:
            _share_bytecode(base, path / base.parent.parent.name / base.parent.name / base.name)
        check_imports(path / "bin" / "python", interpreter)
    site, release, python = inspect_interpreter(path / "bin" / "python")
    return {
        "site": os.path.relpath(site or path, path),
        "nemo_gym": release,
        "python": python,
        "requirements": list(recipe.requirements),
        "interpreter": noted_interpreter(interpreter, path / "bin" / "python"),
    }


def inspect_interpreter(python: Path) -> tuple[Path | None, str | None, str]:
    """The directory that holds its nemo_gym, that release, and its own version. `SetupError` if it does not run."""
    try:
        told = run_command([python, "-I", "-c", _FACTS], env=clean_env(), timeout_s=_FACTS_TIMEOUT_S)
        site, release, own = json.loads(told)
    except (CommandError, ValueError) as error:
        raise SetupError(f"interpreter {str(python)!r} does not run: {_end_of(error)}") from error
    return Path(site) if site else None, release, own


def check_imports(python: Path, interpreter: Interpreter) -> None:
    """Import what every server imports. Raises `UnusableInterpreterError` with the reason."""
    with tempfile.TemporaryDirectory(prefix="gymgate-") as nowhere:
        try:
            run_command(
                [python, "-I", "-c", _CHECK], env=clean_env(), cwd=nowhere, timeout_s=_CHECK_TIMEOUT_S
            )
        except CommandError as error:
            raise UnusableInterpreterError(
                f"NeMo Gym does not import on {interpreter}: {_end_of(error)}"
            ) from error


def _end_of(error: Exception) -> str:
    """The last line that a command wrote to stderr, a traceback's end; else what became of it."""
    errors = error.errors if isinstance(error, CommandError) else ""
    return (errors.strip().splitlines() or [str(error)])[-1]


def _share_bytecode(base: Path, site: Path) -> None:
    """Link what is compiled already; Python passes over what does not fit its source's size and time."""
    for compiled in base.rglob("__pycache__/*.pyc"):
        place = site / compiled.relative_to(base)
        if place.parent.parent.is_dir():
            place.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(compiled, place)


@dataclass(frozen=True)
class _Installation:
    recipe: Recipe
    interpreter: Interpreter
    path: Path
    held: int
    say: Progress

    @property
    def _lifted(self) -> tuple[str, ...]:
        """What makes uv take nemo-gym, a pure Python wheel, for an interpreter below the declared minimum.

        (An override of its metadata does not do: the package index declares the minimum too.)
        """
        below = self.interpreter.version < self.recipe.floor
        return ("--python-version", text(self.recipe.floor)) if below else ()

    def install_release(self) -> None:
        """All else first, as this interpreter is; then nemo-gym, lifted over the declared minimum if need be."""
        release = self.recipe.version
        lock = self.recipe.lock
        if lock is None:
            self.say(f"warning: no lock ships for nemo-gym {release}; resolving its requirements now")
            lock = self._resolve()
        own, others = split_lock(lock)
        exact = ("--no-deps", "--require-hashes")
        try:
            with _file(others) as rest, _file(own) as itself:
                self._install(*exact, "-r", rest)
                copied = ("--link-mode", "copy")  # servers write beside their code: never into uv's cache
                self._install(*exact, *self._lifted, *copied, "-r", itself)
        except UvFailedError as error:
            if not _NO_BUILD.search(str(error)):
                raise
            raise UnusableInterpreterError(
                f"nemo-gym {release} cannot be installed on {self.interpreter}: {error}"
            ) from error

    def _resolve(self) -> str:
        release = self.recipe.version
        with _file(f"nemo-gym=={release}") as wanted:
            command = ("pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate")
            quiet = ("--no-emit-index-url", "--no-emit-find-links")
            python = ("--python", os.fspath(self.interpreter.path))
            try:
                return run_uv(*command, *quiet, *python, *self._lifted, wanted, say=self.say, held=self.held)
            except UvFailedError as error:
                if error.kind == "conflict" and f"no version of nemo-gym=={release}" in str(error):
                    raise SetupError(f"there is no nemo-gym {release} on the package index") from error
                raise

    def install_requirements(self) -> None:
        """Beside the release, whose own versions are held where that is possible; what moves is told."""
        wanted = self.recipe.requirements
        held = pins(self.recipe.lock) if self.recipe.lock else self._installed_pins()
        named = {package_of(requirement) for requirement in wanted}
        freed = {package: pin for package, pin in held.items() if package not in named}
        before = self._installed()
        for attempt, constraints in enumerate((held, freed, {})):
            try:
                self._install_held(wanted if attempt == 0 else (*wanted, *self._declared()), constraints)
                break
            except UvFailedError as error:
                if error.kind != "conflict":
                    raise
                if attempt == 2:
                    raise SetupError(
                        f"{', '.join(wanted)} cannot be installed beside nemo-gym {self.recipe.version}: {error}"
                    ) from error
        if attempt:
            self._tell_moved(before)

    def _install_held(self, wanted: Sequence[str], constraints: dict[str, str]) -> None:
        with _file("\n".join(wanted)) as requirements, _file("\n".join(constraints.values())) as held:
            self._install("-r", requirements, "-c", held)

    def _declared(self) -> list[str]:
        """The release's own requirements, which hold whatever a server asks for."""
        site, *_ = inspect_interpreter(self.path / "bin" / "python")
        assert site is not None
        [metadata] = site.glob("nemo_gym-*.dist-info/METADATA")
        prefix = "Requires-Dist: "
        lines = [
            line for line in metadata.read_text(encoding="utf-8").splitlines() if line.startswith(prefix)
        ]
        return [line.removeprefix(prefix) for line in lines if "extra ==" not in line]

    def _tell_moved(self, before: dict[str, str]) -> None:
        after = self._installed()
        moved = [
            f"{package} {version} -> {after[package]}"
            for package, version in before.items()
            if after.get(package, version) != version
        ]
        if moved:
            self.say(
                f"warning: {', '.join(self.recipe.requirements)} moved {', '.join(moved)} from the versions that "
                f"nemo-gym {self.recipe.version} was locked with"
            )

    def _installed(self) -> dict[str, str]:
        listed = json.loads(
            run_uv("pip", "list", "--format", "json", "--python", self.path / "bin" / "python")
        )
        return {package_of(each["name"]): each["version"] for each in listed}

    def _installed_pins(self) -> dict[str, str]:
        return {
            name: f"{name}=={version}" for name, version in self._installed().items() if name != "nemo-gym"
        }

    def _install(self, *arguments: str | Path) -> None:
        run_uv(
            "pip",
            "install",
            "--python",
            self.path / "bin" / "python",
            *arguments,
            say=self.say,
            held=self.held,
        )


@contextlib.contextmanager
def _step(say: Progress, line: str) -> Iterator[None]:
    """Say what is being done, and every 10 s how long it has taken."""
    done = threading.Event()
    started = time.monotonic()

    def remind() -> None:
        while not done.wait(_REMIND_S):
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
def _file(content: str) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="gymgate-", encoding="utf-8") as handle:
        handle.write(content)
        handle.flush()
        yield Path(handle.name)
