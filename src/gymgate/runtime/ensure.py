"""`ensure_runtime`: the runtime for a release and a set of requirements, made if it is not there."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gymgate.config import RuntimeConfig, cache_dir
from gymgate.errors import SetupError
from gymgate.runtime.interpreters import Interpreter, by_preference, find_interpreters, named_interpreter
from gymgate.runtime.venv import Recipe, UnusableInterpreterError, build, facts_of, inspect_interpreter

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]

FLOORS = {"0.4.0": (3, 12, 0), "0.5.0": (3, 13, 14), "0.6.0": (3, 13, 14), "0.7.0": (3, 13, 14)}
"""Python that each release declares as its minimum."""
_NEWEST_FLOOR = (3, 13, 14)


@dataclass(frozen=True)
class Runtime:
    """An interpreter with nemo-gym installed."""

    python: Path
    site: Path
    """Directory of the installed packages, NeMo Gym's servers among them."""
    version: str
    """Of nemo-gym."""
    requirements: tuple[str, ...] = ()
    """What was installed beside it."""


def find_runtime(config: RuntimeConfig, requirements: Iterable[str] = ()) -> Runtime | None:
    """The runtime if it is there; never makes one."""
    if config.interpreter is not None:
        return _given(config.interpreter, tuple(sorted(set(requirements))))
    recipe = _recipe(config, requirements)
    for path in sorted(
        (cache_dir() / "runtimes").glob(f"nemo-gym-{recipe.version}-py*-{recipe.digest}"), reverse=True
    ):
        facts = facts_of(path)
        if facts is not None and (
            config.python is None or named_interpreter(config.python).label == facts.python
        ):
            return Runtime(
                path / "bin" / "python", facts.site, facts.nemo_gym or recipe.version, recipe.requirements
            )
    return None


def ensure_runtime(
    config: RuntimeConfig, requirements: Iterable[str] = (), *, progress: Progress | None = None
) -> Runtime:
    """The runtime for `config` with `requirements` (PyPI requirement strings) installed; made on first use.

    Blocks: some seconds with a warm uv cache, a minute or more without. Instant, and offline, once made. Any number of
    processes may call it at once. Raises `SetupError`.
    """
    wanted = tuple(sorted(set(requirements)))
    if (found := find_runtime(config, wanted)) is not None:
        return found
    say = progress or (lambda line: logger.info("%s", line))
    recipe = _recipe(config, wanted)
    failures: list[str] = []
    for interpreter in _interpreters(config, recipe.floor):
        if interpreter.version < recipe.floor:
            floor = ".".join(map(str, recipe.floor))
            logger.warning(
                "nemo-gym %s declares Python >= %s; none is here, so %s is used",
                config.version,
                floor,
                interpreter,
            )
        try:
            build(recipe, interpreter, cache_dir() / "runtimes", say)
        except UnusableInterpreterError as error:
            failures.append(str(error))
            continue
        made = find_runtime(config, wanted)
        assert made is not None
        return made
    raise SetupError(f"no interpreter here can run nemo-gym {config.version}: {'; '.join(failures)}")


def _interpreters(config: RuntimeConfig, floor: tuple[int, int, int]) -> list[Interpreter]:
    if config.python is not None:
        return [named_interpreter(config.python)]
    found = by_preference(find_interpreters(), floor)
    if not found:
        raise SetupError(
            "no CPython >= 3.12 found for NeMo Gym; get one with `uv python install 3.13`, your system's packages or pyenv, "
            "or name one with --python PATH"
        )
    return found


def _recipe(config: RuntimeConfig, requirements: Iterable[str]) -> Recipe:
    lock = resources.files("gymgate.runtime") / "locks" / f"nemo-gym-{config.version}.txt"
    text = lock.read_text() if lock.is_file() else None
    wanted = tuple(sorted(set(requirements)))
    identity = "\n".join([text or config.version, *wanted, platform.machine(), platform.system()])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return Recipe(config.version, FLOORS.get(config.version, _NEWEST_FLOOR), text, wanted, digest)


def _given(interpreter: str, requirements: tuple[str, ...]) -> Runtime:
    facts = inspect_interpreter(Path(interpreter).expanduser())
    if facts.nemo_gym is None:
        raise SetupError(f"interpreter {interpreter!r} has no nemo-gym installed")
    return Runtime(Path(interpreter).expanduser(), facts.site, facts.nemo_gym, requirements)
