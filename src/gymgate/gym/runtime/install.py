"""Fill an environment for NeMo Gym: the release, pinned by its lock, then what servers require beside it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gymgate.core.errors import SetupError
from gymgate.gym.inside import names
from gymgate.gym.runtime.command import CommandError, Progress, run_command
from gymgate.gym.runtime.interpreters import Interpreter, text
from gymgate.gym.runtime.lockfile import PYTHON_FLOOR, package_of, pins, split_lock
from gymgate.gym.runtime.uv import UvFailedError, run_uv
from gymgate.gym.runtime.variables import clean_env

_CHECK_TIMEOUT_S = 300.0
_REMIND_S = 10.0
_NO_BUILD = re.compile(
    r"no wheels|no usable wheels|matching Python|Failed to build|depends on Python|satisfy Python"
)
"""uv's messages when a package does not fit this interpreter; the index and the network are fine."""


@dataclass(frozen=True)
class Recipe:
    """Decides, together with the interpreter, what is in an environment."""

    version: str
    lock: str | None
    """Requirements with hashes; `None` for a release without a lock, which is resolved when it is installed."""
    requirements: tuple[str, ...]
    digest: str

    def name(self, interpreter: Interpreter) -> str:
        """Directory name of the environment made with `interpreter`."""
        return f"nemo-gym-{self.version}-py{interpreter.label}-{self.digest}"


class UnusableInterpreterError(Exception):
    """The release cannot be installed for this interpreter, or this interpreter cannot import it; another one may."""


@dataclass(frozen=True)
class Installation:
    """The making of one environment, in the directory `path`."""

    recipe: Recipe
    interpreter: Interpreter
    path: Path
    lock: int
    """Descriptor of the lock, for uv to inherit."""
    progress: Progress

    @property
    def python(self) -> Path:
        """The environment's own interpreter."""
        return self.path / "bin" / "python"

    @property
    def site(self) -> Path:
        """The directory of its packages."""
        major, minor, _ = self.interpreter.version
        return self.path / "lib" / f"python{major}.{minor}" / "site-packages"

    def make(self, base: Path | None) -> dict[str, Any]:
        """Make it, prove that it works, and return its marker's content.

        `base` is the package directory of the same release without further requirements, whose bytecode is shared.
        Raises `UnusableInterpreterError`, `UvFailedError`, `SetupError`.
        """
        recipe = self.recipe
        lock = recipe.lock or self._resolve()
        servers = f" for servers that need {', '.join(recipe.requirements)}" if recipe.requirements else ""
        with self._step(
            f"making a virtual environment{servers}: nemo-gym {recipe.version}, {self.interpreter}"
        ):
            run_uv(
                *("venv", "--clear", "--relocatable", "--python", self.interpreter.path, self.path),
                lock=self.lock,
            )
        size = "about 1 GB on disk" if base is None else "shares its files with the one that is there"
        with self._step(f"installing nemo-gym {recipe.version} ({size})"):
            self._install_release(lock)
        if recipe.requirements:
            with self._step(f"installing {', '.join(recipe.requirements)}"):
                self._install_requirements()
        with self._step("checking that NeMo Gym imports"):
            if base is not None:
                _share_bytecode(base, self.site)  # first: the check compiles what it does not find
            self._check_imports()
        return {
            "site": os.path.relpath(self.site, self.path),
            "nemo_gym": self._versions()["nemo-gym"],
            "python": self.interpreter.label,
            "requirements": list(recipe.requirements),
            "interpreter": {"path": str(self.interpreter.path)},
        }

    @property
    def _raised(self) -> tuple[str, ...]:
        """Lets uv install nemo-gym, as if on the Python that it declares, although this one is older.

        (An override of its metadata does not do: the package index declares the minimum too.)
        """
        below = self.interpreter.version < PYTHON_FLOOR
        return ("--python-version", text(PYTHON_FLOOR)) if below else ()

    def _install_release(self, lock: str) -> None:
        """Install everything else for this interpreter as it is, then nemo-gym, if need be past its declared minimum."""
        release = self.recipe.version
        own, others = split_lock(lock)
        exact = ("--no-deps", "--require-hashes")
        copied = ("--link-mode", "copy")  # servers write beside their code, which must not be uv's cache
        try:
            with _file([others]) as rest, _file([own]) as itself:
                self._install(*exact, "-r", rest)
                self._install(*exact, *self._raised, *copied, "-r", itself)
        except UvFailedError as error:
            if not _NO_BUILD.search(str(error)):
                raise
            raise UnusableInterpreterError(
                f"nemo-gym {release} cannot be installed on {self.interpreter}: {error}"
            ) from error

    def _resolve(self) -> str:
        """Return a lock for a release that has none."""
        release = self.recipe.version
        self.progress(f"resolving the requirements of nemo-gym {release}, for which gymgate ships no lock")
        command = ("pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate")
        quiet = ("--no-emit-index-url", "--no-emit-find-links", "--python", self.interpreter.path)
        with _file([f"nemo-gym=={release}"]) as file:
            try:
                return run_uv(*command, *quiet, *self._raised, file, progress=self.progress, lock=self.lock)
            except UvFailedError as error:
                if error.kind == "conflict" and f"no version of nemo-gym=={release}" in str(error):
                    raise SetupError(f"there is no nemo-gym {release} on the package index") from error
                raise

    def _install_requirements(self) -> None:
        """Install them beside the release with the release's versions kept, or as few of them changed as possible."""
        requested = self.recipe.requirements
        before = self._versions()
        locked = (
            pins(self.recipe.lock)
            if self.recipe.lock
            else {name: f"{name}=={version}" for name, version in before.items() if name != "nemo-gym"}
        )
        packages = {package_of(requirement) for requirement in requested}
        free = {package: pin for package, pin in locked.items() if package not in packages}
        # Once pins are given up, nothing but these keeps the release's own requirements met.
        [release] = metadata.distributions(name="nemo-gym", path=[str(self.site)])
        own = [requirement for requirement in release.requires or () if "extra ==" not in requirement]
        complete = (*requested, *own)
        for requirements, constraints in ((requested, locked), (complete, free), (complete, {})):
            try:
                with _file(requirements) as file, _file(constraints.values()) as held:
                    self._install("-r", file, "-c", held)
                break
            except UvFailedError as error:
                if error.kind != "conflict":
                    raise
                failure = error
        else:
            raise SetupError(
                f"{', '.join(requested)} cannot be installed next to nemo-gym {self.recipe.version}: {failure}",
                kind=failure.kind,
            ) from failure
        after = self._versions()
        changed = [
            f"{package} {version} -> {after[package]}"
            for package, version in before.items()
            if after.get(package, version) != version
        ]
        if changed:
            self.progress(
                f"warning: {', '.join(requested)} changed {', '.join(changed)}; nemo-gym {self.recipe.version} was locked "
                "with the former"
            )

    def _versions(self) -> dict[str, str]:
        """The version of each installed package, by normalised name."""
        distributions = metadata.distributions(path=[str(self.site)])
        return {package_of(distribution.name): distribution.version for distribution in distributions}

    def _install(self, *arguments: str | Path) -> None:
        """Run uv's `pip install`; its downloads, which may be dozens, are one line at the end."""
        downloads = 0

        def report(line: str) -> None:
            nonlocal downloads
            if line.startswith("downloading "):
                downloads += 1
            else:
                self.progress(line)

        run_uv("pip", "install", "--python", self.python, *arguments, progress=report, lock=self.lock)
        if downloads:
            self.progress(f"downloaded {downloads} large {'package' if downloads == 1 else 'packages'}")

    def _check_imports(self) -> None:
        """Import what every server imports. Raises `UnusableInterpreterError` with the reason.

        This proves the environment and leaves behind the bytecode that a start needs (3 s of imports instead of 6). Compiling
        all 16,000 files would add 28 s of CPU time.
        """
        command: list[str | Path] = [self.python, "-I", names.__file__, *names.PRELOADED]
        with tempfile.TemporaryDirectory(prefix="gymgate-") as empty:
            try:
                run_command(command, env=clean_env(), cwd=empty, timeout_s=_CHECK_TIMEOUT_S)
            except CommandError as error:
                raise UnusableInterpreterError(
                    f"{self.interpreter} cannot import NeMo Gym: {error.last_line}"
                ) from error

    @contextlib.contextmanager
    def _step(self, line: str) -> Iterator[None]:
        """Report a step, and every 10 s how long it has taken so far."""
        done = threading.Event()
        started = time.monotonic()

        def remind() -> None:
            while not done.wait(_REMIND_S):
                self.progress(f"still {line} ({time.monotonic() - started:.0f} s)")

        self.progress(line)
        reminder = threading.Thread(target=remind, daemon=True)
        reminder.start()
        try:
            yield
        finally:
            done.set()
            reminder.join()


def _share_bytecode(base: Path, site: Path) -> None:
    """Link the bytecode of the same sources; Python ignores what does not fit its source's size and time."""
    for compiled in base.rglob("__pycache__/*.pyc"):
        place = site / compiled.relative_to(base)
        if place.parent.parent.is_dir():
            place.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(compiled, place)


@contextlib.contextmanager
def _file(lines: Iterable[str]) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="gymgate-", encoding="utf-8") as handle:
        handle.write("\n".join(lines))
        handle.flush()
        yield Path(handle.name)
