"""The list of mutants: a TOML file per room beside this module."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locate import NotLocatedError, mutated, source_of

NEEDS_GYM = ("tests/integration", "tests/faults")


@dataclass(frozen=True)
class Mutant:
    """One deliberate mistake, and the tests that should notice it."""

    room: str
    at: str
    """`MODULE:QUALNAME`."""
    find: str
    """An expression or statement in it."""
    put: str
    """What stands there instead."""
    breaks: str
    """What a user would see."""
    tests: tuple[str, ...]
    match: int | None = None
    """Which occurrence, where there are several."""
    survives: str | None = None
    """Why no test notices it, for one that is known to survive."""
    limit_s: float = 180.0

    def __str__(self) -> str:
        return f"{self.room}: {self.at.partition(':')[2]}: {self.breaks}"

    @property
    def needs_gym(self) -> bool:
        """Whether its tests run real Gym servers."""
        return any(test.startswith(NEEDS_GYM) for test in self.tests)

    def applied(self, root: Path) -> tuple[Path, str]:
        """Return the file below `root` and what it holds with the mutation. Raises `NotLocatedError`."""
        if missing := [test for test in self.tests if not (root / test.partition("::")[0]).exists()]:
            raise NotLocatedError(f"there is no {missing[0]}")
        path = source_of(root, self.at)
        return path, mutated(path.read_text(), self.at, self.find, self.put, self.match)


def read_mutants(directory: Path = Path(__file__).parent) -> list[Mutant]:
    """Return every mutant, room by room. `tests` of a file hold for each of its mutants without own ones."""
    found = []
    for path in sorted(directory.glob("*.toml")):
        content: dict[str, Any] = tomllib.loads(path.read_text())
        for entry in content["mutant"]:
            tests = tuple(entry.pop("tests", content.get("tests", ())))
            found.append(Mutant(room=path.stem, tests=tests, **entry))
    return found
