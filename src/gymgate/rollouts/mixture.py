"""Several sources of rows as one stream."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gymgate.core.errors import ConfigError

RowT = TypeVar("RowT")
"""A row, or whatever stands for one."""


@dataclass(eq=False)
class _Live(Generic[RowT]):
    rows: Iterator[RowT]
    weight: float
    left: float
    """Rows that may still be drawn; infinite without a cap."""


def blend(
    sources: Sequence[tuple[Iterable[RowT], float]],
    *,
    seed: int = 0,
    caps: Sequence[int | None] | None = None,
) -> Iterator[RowT]:
    """Draw each next row from a source with a probability in proportion to its weight.

    The order within a source is kept. A source that is exhausted, or has given as many rows as its cap, drops
    out and the others share its weight; the stream ends with the last one. The same sources, seed and caps
    give the same stream; no source is read further than it is drawn. Raises `ConfigError` for a weight that
    is not positive and finite, or caps that do not match the sources.
    """
    bounds = list(caps) if caps is not None else [None] * len(sources)
    if len(bounds) != len(sources):
        raise ConfigError(f"{len(bounds)} caps for {len(sources)} sources")
    for number, ((_, weight), cap) in enumerate(zip(sources, bounds, strict=True)):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"weight of source {number} must be positive and finite, not {weight!r}")
        if cap is not None and cap < 0:
            raise ConfigError(f"cap of source {number} must not be negative, not {cap!r}")
    live = [
        _Live(iter(rows), weight, math.inf if cap is None else cap)
        for (rows, weight), cap in zip(sources, bounds, strict=True)
        if cap != 0
    ]
    return _draw(live, random.Random(seed))


def _draw(live: list[_Live[RowT]], dice: random.Random) -> Iterator[RowT]:
    while live:
        [source] = dice.choices(live, [share.weight for share in live])
        row = next(source.rows, None)
        if row is not None:
            source.left -= 1
            yield row
        if row is None or source.left <= 0:
            live.remove(source)
