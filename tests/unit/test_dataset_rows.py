"""Rows: validation, keys, where they come from, blends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gymgate.gym.row_sources as sources
from gymgate.core.errors import ConfigError, DataError, MissingExtraError
from gymgate.core.extras import install_command
from gymgate.gym.catalog import DataFile, Environment
from gymgate.gym.row_sources import RowSource, _one_split, _without_padding, open_rows
from gymgate.rollouts import Row, blend, make_row, row_key

ROW = {"responses_create_params": {"input": "hi"}}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))


def write_rows(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_is_kept_verbatim() -> None:
    data = {**ROW, "agent_ref": {"type": "responses_api_agents", "name": "a"}, "_ng_task_index": 3}
    row = make_row(data, "x.jsonl", 7)
    assert row == Row(data=data, key=row.key, agent="a", source="x.jsonl", line=7)
    assert row.data is data


def test_a_key_is_the_rows_content() -> None:
    key = row_key({"a": 1, "b": {"c": [1, 2.5, None], "d": "é"}})
    assert key == row_key({"b": {"d": "é", "c": [1, 2.5, None]}, "a": 1, "_ng_rollout_index": 4})
    assert key != row_key({"a": 1, "b": {"c": [1, 2.5, None], "d": "é", "_ng_x": 1}})
    assert key != row_key({"a": 2})
    assert len(key) == 16
    assert int(key, 16) >= 0
    assert row_key({"a": 2**70}) != row_key({"a": 2**70 + 1})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            {"question": "q", "answer": "a"},
            r"responses_create_params.*raw data \('question', ",
        ),
        ({}, "raw data"),
        ({"row_key": "0" * 16, "repeat": 0, "source": "rows.jsonl", "line": 3}, r"rescore .*rows\.jsonl:3"),
        ({"responses_create_params": None}, "no responses_create_params"),
        ({"responses_create_params": {"tools": []}}, "responses_create_params .*input"),
        ({"responses_create_params": "{}"}, "not str"),
        ({"responses_create_params": {"input": 5}}, "input .*'5'"),
        ({"responses_create_params": {"input": ["hi"]}}, r"input .*hi"),
        ({**ROW, "agent_ref": "a"}, "agent_ref must be"),
        ({**ROW, "agent_ref": {"name": ""}}, "agent_ref must be"),
        ({**ROW, "image": b"raw"}, "JSON"),
    ],
)
def test_a_row_that_does_not_fit_is_named(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        make_row(data, "x.jsonl", 7)
    assert str(caught.value).startswith("x.jsonl:7: ")
    assert (caught.value.path, caught.value.line) == ("x.jsonl", 7)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    path = tmp_path / "release" / "e"
    example = write_rows(path / "data" / "example.jsonl", {**ROW, "i": 0}, {**ROW, "i": 1})
    raw = write_rows(path / "data" / "raw.jsonl", {"question": "q"})
    data = (DataFile("example", example, "rows"), DataFile("raw", raw, "raw"))
    return Environment("e", "resources_servers", path, data=data, configs=(config(path),))


def config(path: Path) -> Any:
    from gymgate.gym.catalog import EnvConfig

    return EnvConfig("e", path / "configs" / "e.yaml")


def test_rows_by_name_and_by_path(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = open_rows("example", environment=environment)
    assert [row.data["i"] for row in rows] == [0, 1]
    assert (len(rows), rows[1].data["i"], rows[-1].line, [row.line for row in rows[:1]]) == (2, 1, 2, [1])
    assert rows[0].source == str(environment.data[0].path)
    own = write_rows(tmp_path / "own.jsonl", {**ROW, "i": 9})
    monkeypatch.chdir(tmp_path)
    for source, place in (
        (str(own), environment),
        ("./own.jsonl", None),
        ("own.jsonl", None),
        ("own.jsonl", environment),
    ):
        (row,) = open_rows(source, environment=place)
        assert row.data["i"] == 9
    write_rows(tmp_path / "example", {**ROW, "i": 9})  # what an environment calls its data goes before
    assert len(open_rows("example", environment=environment)) == 2


def test_raw_rows_are_an_error_when_reached(environment: Environment) -> None:
    rows = open_rows("raw", environment=environment)
    with pytest.raises(DataError, match=r"raw\.jsonl:1: .*: `gymgate data prepare"):
        next(iter(rows))


@pytest.mark.parametrize(
    ("source", "error", "reason"),
    [
        ("nope", ConfigError, "'nope'.*: example, raw"),
        ("", ConfigError, "^''"),
        ("hf:", ConfigError, "^'hf:'"),
        ("nope.jsonl", DataError, "'nope.jsonl'"),
        ("gone/nope.jsonl", DataError, "'gone/nope.jsonl'"),
    ],
)
def test_an_unknown_source(
    environment: Environment, source: str, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        open_rows(source, environment=environment)


def test_a_name_without_an_environment_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'example'.*hf:owner/name"):
        open_rows("example", environment=None)


def test_without_the_datasets_library_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("datasets"))):
        open_rows("hf:owner/name", environment=None)


def test_splits_are_told_from_paths() -> None:
    assert sources._name_and_split("owner/name") == ("owner/name", None)
    assert sources._name_and_split("owner/name:test") == ("owner/name", "test")
    assert sources._name_and_split("dir:with/colon") == ("dir:with/colon", None)


def stream(name: str, count: int, drawn: list[str] | None = None) -> Iterator[Row]:
    for number in range(count):
        if drawn is not None:
            drawn.append(name)
        yield Row({}, f"{name}{number}", None, name, number + 1)


def shares(rows: Iterator[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row.source] = found.get(row.source, 0) + 1
    return found


def test_a_blend_is_the_same_for_the_same_seed() -> None:
    def keys(seed: int) -> list[str]:
        return [row.key for row in blend([(stream("a", 50), 1), (stream("b", 50), 1)], seed=seed)]

    assert keys(1) == keys(1)
    assert keys(1) != keys(2)
    assert sorted(keys(1)) == sorted(keys(2))


def test_a_blend_keeps_each_sources_order_and_follows_the_weights() -> None:
    rows = blend([(stream("a", 10_000), 3), (stream("b", 10_000), 1)], seed=0)
    first = [next(rows) for _ in range(4000)]
    assert 0.72 < sum(row.source == "a" for row in first) / 4000 < 0.78
    for name in "ab":
        lines = [row.line for row in first if row.source == name]
        assert lines == sorted(lines)


def test_caps_and_ends() -> None:
    rows = blend([(stream("a", 10), 1), (stream("b", 3), 5), (stream("c", 9), 1)], caps=[4, None, 0])
    assert shares(rows) == {"a": 4, "b": 3}
    assert shares(blend([])) == {}


def test_a_blend_reads_no_further_than_it_is_drawn() -> None:
    drawn: list[str] = []
    rows = blend([(stream("a", 100, drawn), 1), (stream("b", 100, drawn), 1)], seed=0)
    assert drawn == []
    for _ in range(5):
        next(rows)
    assert len(drawn) == 5


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: blend([([], 0)]), "source 0 "),
        (lambda: blend([([], float("nan"))]), "source 0 "),
        (lambda: blend([([], 1)], caps=[1, 2]), "2 caps for 1 sources"),
        (lambda: blend([([], 1)], caps=[-1]), "source 0 "),
    ],
)
def test_a_blend_that_cannot_be(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        call()


def test_no_more_rows_are_taken_than_there_are(tmp_path: Path) -> None:
    """A bad row is one; a file that is another one is none."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"responses_create_params": {"input": "hi"}}\nbroken\n')
    source = RowSource(open_rows(str(path), environment=None), limit=9)
    assert len(source) == 2
    assert [type(row).__name__ for _, row in source.readable()] == ["Row", "DataError"]
    path.write_text("x")
    with pytest.raises(DataError):
        list(source.readable())


def test_a_dataset_with_one_split_needs_no_name() -> None:
    assert _one_split({"only": [1]}, None, "hf:o/d") == [1]
    assert _one_split({"test": [1], "train": [2]}, None, "hf:o/d") == [2]
    with pytest.raises(ConfigError, match=":a, :b"):
        _one_split({"a": [1], "b": [2]}, None, "hf:o/d")


def test_only_nulls_are_padding() -> None:
    params = {
        "input": [],
        "temperature": 0,
        "store": False,
        "tools": None,
        "text": {"format": None, "verbosity": ""},
    }
    kept = {"input": [], "temperature": 0, "store": False, "text": {"verbosity": ""}}
    assert _without_padding({"responses_create_params": params, "answer": None}) == {
        "responses_create_params": kept,
        "answer": None,
    }
