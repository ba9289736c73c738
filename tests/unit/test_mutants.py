"""The list of mutants fits the code as it is: each can be located. `./dev mutants` tries them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from listed import read_mutants  # noqa: E402
from locate import NotLocatedError, mutated  # noqa: E402

SOURCE = """
LIMIT = 3

class Route:
    @property
    def open(self): return not self.closed

    async def admit(self, name):  # a comment
        if (self.calls
                >= LIMIT):
            raise ValueError("no")
        self.calls += 1
        self.names.append("é"); self.names.append("ö")
        self.names.append(name)
        return name or None
"""


def test_every_mutant_can_be_located() -> None:
    """Adapt the entry in `tests/mutants` to the code's new shape."""
    lost = []
    mutants = [*read_mutants(), *read_mutants(ROOT / "tests" / "mutants" / "races")]
    for mutant in mutants:
        try:
            mutant.applied(ROOT)
        except NotLocatedError as error:
            lost.append(f"{mutant}: {error}")
    assert lost == []
    assert len(mutants) >= 220


@pytest.mark.parametrize(
    ("symbol", "find", "put", "before", "after"),
    [
        ("LIMIT", "3", "4", "LIMIT = 3", "LIMIT = (4)"),
        ("Route.open", "not self.closed", "True", "return not self.closed", "return (True)"),
        ("Route.admit", "self.calls >= LIMIT", "False", "self.calls\n                >= LIMIT", "(False)"),
        ("Route.admit", "self.names.append('ö')", "pass", 'self.names.append("ö")', "pass"),
        (
            "Route.admit",
            "self.names.append(name)",
            "if name: return",
            "self.names.append(name)",
            "if name:\n            return",
        ),
        ("Route.admit", "... or None", "name", "return name or None", "return (name)"),
        ("Route", "self.calls += 1", "pass", "self.calls += 1", "pass"),
    ],
)
def test_a_place_is_found_by_its_syntax(symbol: str, find: str, put: str, before: str, after: str) -> None:
    assert SOURCE.count(before) == 1
    assert mutated(SOURCE, f"m:{symbol}", find, put) == SOURCE.replace(before, after)


@pytest.mark.parametrize(
    ("symbol", "find", "put", "match", "said"),
    [
        ("Route.leave", "1", "2", None, "m:Route.leave does not exist"),
        ("Route.admit", "self.limit", "2", None, "'self.limit'"),
        ("Route.admit", "self.names", "()", None, "3 times"),
        ("Route.admit", "self.names", "()", 4, "match = 4 "),
        ("Route.admit", "self.calls >= LIMIT", "self.calls >= LIMIT", None, "changes nothing"),
        ("Route.admit", "1", "2 +", None, "Python"),
    ],
)
def test_what_cannot_be_located_says_why(
    symbol: str, find: str, put: str, match: int | None, said: str
) -> None:
    with pytest.raises(NotLocatedError, match=said):
        mutated(SOURCE, f"m:{symbol}", find, put, match)


def test_one_of_several_is_chosen_by_its_number() -> None:
    changed = mutated(SOURCE, "m:Route.admit", "self.names", "()", 3)
    assert changed == SOURCE.replace("self.names.append(name)", "(()).append(name)")
