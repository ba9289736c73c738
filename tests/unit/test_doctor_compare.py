"""The doctor's pure parts: ids that are tokenised again, and the matrix of versions."""

from __future__ import annotations

import pytest

from gymgate.core.extras import install_command
from gymgate.doctor.packages import NEEDED, check_versions, meets
from gymgate.doctor.retokenise import first_difference, retokenise
from gymgate.tokens import TokenTurn

TEXTS = {1: "a", 2: "b", 3: "ab"}


def decode(ids: list[int]) -> str:
    return "".join(TEXTS[token] for token in ids)


def encode(text: str) -> list[int]:
    """Greedy: "ab" is one id."""
    return [
        3 if part == "ab" else 1 if part == "a" else 2
        for part in text.replace("ab", "|ab|").split("|")
        if part
    ]


def test_ids_that_another_tokenisation_would_give_are_counted() -> None:
    """Call 1 samples [3 1], which comes back; call 2 samples [1 1 2], of which "ab" becomes one id."""
    drift = retokenise([TokenTurn([9], [3, 1]), TokenTurn([9], [1, 1, 2])], decode, encode)
    assert (drift.sampled, drift.differing) == (5, 2)
    assert drift.example == "call 2, from id 1 on: [1, 2] become [3]"


def test_no_drift_has_no_example() -> None:
    assert retokenise([TokenTurn([9], [3, 3])], decode, encode) == (2, 0, "")


@pytest.mark.parametrize(
    ("one", "other", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)]
)
def test_the_first_difference(one: list[int], other: list[int], at: int | None) -> None:
    assert first_difference(one, other) == at


@pytest.mark.parametrize(
    ("version", "holds"),
    [
        ("1.14.9", False),
        ("1.15.0", True),
        ("1.16.0", True),
        ("1.16", True),
        ("1.17.0rc1", True),
        ("2.0", False),
        ("1.20+cu1", True),
        ("nightly", False),
    ],
)
def test_versions_in_a_range(version: str, holds: bool) -> None:
    assert meets(version, "trl>=1.15,<2") is holds


def test_a_missing_package_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDED, "trl", ("no-such-package", "pytest>=999", "click>=8"))
    missing, old, fits = check_versions("trl")
    assert (missing.ok, missing.detail) == (
        False,
        f"not installed; {install_command('trl', 'torch')}",
    )
    assert old.ok is False
    assert old.detail.endswith(" pip install 'pytest>=999'")
    assert fits.ok is True
