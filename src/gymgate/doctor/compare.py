"""What a plain client, that tokenises text again, would make of exact ids. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gymgate.tokens import TokenTurn


class Drift(NamedTuple):
    """How the ids that were sampled differ from those of their text."""

    sampled: int
    """Ids, over all turns."""
    differing: int
    """Of them, those from the first that differs to their turn's end."""
    example: str
    """The first difference; empty without one."""


def retokenised(
    turns: Sequence[TokenTurn], decode: Callable[[list[int]], str], encode: Callable[[str], list[int]]
) -> Drift:
    """Tokenise the text of each turn's sampled ids again."""
    differing, example = 0, ""
    for number, turn in enumerate(turns, 1):
        ids = list(turn.completion_ids)
        again = encode(decode(ids))
        at = first_difference(ids, again)
        if at is None:
            continue
        differing += len(ids) - min(at, len(ids))
        example = example or f"call {number}, from id {at} on: {ids[at : at + 3]} become {again[at : at + 3]}"
    return Drift(sum(len(turn.completion_ids) for turn in turns), differing, example)


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Position at which two sequences part; `None` if they are equal."""
    for position, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return position
    return None if len(ids) == len(others) else min(len(ids), len(others))
