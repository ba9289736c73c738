"""Compare the ids that were sampled with those that a client gets when it tokenises their text. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gymgate.tokens import TokenTurn


class Retokenised(NamedTuple):
    """How sampled ids differ from the ids of their text."""

    sampled: int
    """Ids, over all turns."""
    differing: int
    """Ids from the first that differs to the end of its turn, over all turns."""
    example: str
    """The first difference; empty if there is none."""


def retokenise(
    turns: Sequence[TokenTurn], decode: Callable[[list[int]], str], encode: Callable[[str], list[int]]
) -> Retokenised:
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
    return Retokenised(sum(len(turn.completion_ids) for turn in turns), differing, example)


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first position at which two sequences differ; `None` if they are equal."""
    for position, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return position
    return None if len(ids) == len(others) else min(len(ids), len(others))
