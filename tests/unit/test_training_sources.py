"""Blends for trainers: weights hold over the whole stream, every row is in it."""

from __future__ import annotations

from collections import Counter

import pytest

from gymgate.dataset import Row
from gymgate.dataset.row import make_row
from gymgate.errors import ConfigError
from gymgate.integrations.training.sources import Source, blended


def source(name: str, count: int, weight: float) -> Source:
    rows = [make_row({"responses_create_params": {"input": f"{name}{i}"}}, name, i) for i in range(count)]
    return Source(name, rows, weight)


def prompt(row: Row) -> str:
    return str(row.data["responses_create_params"]["input"])


def test_a_small_source_is_repeated_so_that_the_weights_hold() -> None:
    drawn = list(blended([source("a", 10, 2.0), source("b", 400, 1.0)], limit=None, seed=0))
    counts = Counter(name for name, _ in drawn)
    assert counts["b"] == 400
    assert counts["a"] / counts["b"] == pytest.approx(2.0, rel=0.15)
    assert {prompt(row) for _, row in drawn} == {f"a{i}" for i in range(10)} | {f"b{i}" for i in range(400)}


def test_a_limit_bounds_it_and_one_source_is_given_once() -> None:
    sources = [source("a", 5, 1.0), source("b", 5, 1.0)]
    assert len(list(blended(sources, limit=3, seed=1))) == 3
    assert [prompt(row) for _, row in blended(sources[:1], limit=None, seed=1)] == [f"a{i}" for i in range(5)]


def test_the_same_seed_gives_the_same_stream() -> None:
    sources = [source("a", 20, 1.0), source("b", 20, 3.0)]
    first, again, other = ([name for name, _ in blended(sources, limit=None, seed=s)] for s in (1, 1, 2))
    assert first == again != other


def test_an_environment_without_rows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no rows for environment 'b'"):
        list(blended([source("a", 1, 1.0), source("b", 0, 1.0)], limit=None, seed=0))
