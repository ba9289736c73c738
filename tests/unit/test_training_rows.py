"""Blends for trainers: weights hold over the whole stream, every row is in it."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.integrations.training.sources import (
    WeightedSource,
    blended,
    checked_weight,
    open_training_sources,
    prompt_messages,
    read_rows,
)
from gymgate.rollouts import Row
from gymgate.rollouts.row import make_row


def source(name: str, count: int, weight: float) -> WeightedSource:
    rows = [make_row({"responses_create_params": {"input": f"{name}{i}"}}, name, i) for i in range(count)]
    return WeightedSource(name, rows, weight)


def drawn_from(sources: list[WeightedSource], seed: int, limit: int | None = None) -> list[tuple[str, Row]]:
    return list(islice(read_rows(sources, blended(sources, seed)), limit))


def prompt(row: Row) -> str:
    return str(row.data["responses_create_params"]["input"])


def test_a_small_source_is_repeated_so_that_the_weights_hold() -> None:
    drawn = drawn_from([source("a", 10, 2.0), source("b", 400, 1.0)], 0)
    counts = Counter(name for name, _ in drawn)
    assert counts["b"] == 400
    assert counts["a"] / counts["b"] == pytest.approx(2.0, rel=0.15)
    assert {prompt(row) for _, row in drawn} == {f"a{i}" for i in range(10)} | {f"b{i}" for i in range(400)}


def test_a_limit_bounds_it_and_one_source_is_given_once() -> None:
    sources = [source("a", 5, 1.0), source("b", 5, 1.0)]
    assert len(drawn_from(sources, 1, 3)) == 3
    assert [prompt(row) for _, row in drawn_from(sources[:1], 1)] == [f"a{i}" for i in range(5)]


def test_the_same_seed_gives_the_same_stream() -> None:
    sources = [source("a", 20, 1.0), source("b", 20, 3.0)]
    first, again, other = ([name for name, _ in drawn_from(sources, seed)] for seed in (1, 1, 2))
    assert first == again != other


def test_an_environment_without_rows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'b'"):
        drawn_from([source("a", 1, 1.0), source("b", 0, 1.0)], 0)


@pytest.mark.parametrize("weight", ["abc", "2", True, 0, -1, float("nan"), float("inf"), 10**400, [1], None])
def test_a_weight_is_a_positive_number(weight: Any) -> None:
    with pytest.raises(ConfigError, match="'mcqa'"):
        checked_weight("mcqa", weight)
    assert checked_weight("mcqa", 2) == 2.0


@pytest.mark.parametrize(
    "rows",
    [["a.jsonl"], 3, {"data": ["a.jsonl"]}, {"data": None}, {"weight": "abc"}, {"file": "a"}, {1: 2}],
    ids=str,
)
def test_rows_of_an_environment_that_are_no_source(rows: Any) -> None:
    """A trainer's config is YAML: its values have any type. They are refused before anything is installed."""
    with pytest.raises(ConfigError, match="'mcqa'"):
        open_training_sources({"mcqa": rows}, RuntimeConfig(python="/nowhere"))
    with pytest.raises(ConfigError, match="JSONL"):
        open_training_sources(3, RuntimeConfig(python="/nowhere"))


def test_prompts_name_what_is_no_text() -> None:
    content = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": "data:"}]
    row = {"responses_create_params": {"input": [{"role": "user", "content": content}]}}
    assert prompt_messages(row)[0]["content"] == "see [input_image]"
    assert prompt_messages({"responses_create_params": {"input": "plain"}})[0]["content"] == "plain"


def test_a_weight_of_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="0"):
        drawn_from([source("a", 1, 1.0), source("b", 1, 0.0)], 0)
