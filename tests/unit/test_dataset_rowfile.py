"""JSONL by byte offset: streaming, random access, the cached index, malformed lines."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymgate.core import codec
from gymgate.core.errors import DataError
from gymgate.rollouts import RowFile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def streamed(rows: RowFile) -> Iterator[dict[str, Any]]:
    return (row for _, row in rows.numbered())


def at(rows: RowFile, position: int) -> dict[str, Any]:
    return rows.numbered_at(position)[1]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"i": 0}\n{"i": 1}\n{"i": 2}\n', id="plain"),
        pytest.param('{"i": 0}\n{"i": 1}\n{"i": 2}', id="no-last-newline"),
        pytest.param('{"i": 0}\r\n{"i": 1}\r\n{"i": 2}\r\n', id="crlf"),
        pytest.param('\n{"i": 0}\n\n  \n{"i": 1}\r\n\t\n{"i": 2}\n\n', id="blank-lines"),
        pytest.param('{"i": 0}\n\x0c\n{"i": 1}\n \x0b\n\n{"i": 2}\n\x0b', id="blank-to-python-alone"),
        pytest.param('\ufeff{"i": 0}\n{"i": 1}\n{"i": 2}\n', id="byte-order-mark"),
    ],
)
def test_iteration_and_random_access_agree(tmp_path: Path, text: str) -> None:
    rows = RowFile(write(tmp_path / "rows.jsonl", text))
    assert [row["i"] for row in streamed(rows)] == [0, 1, 2]
    assert len(rows) == 3
    assert [at(rows, position)["i"] for position in (0, 1, 2, -1, -3)] == [0, 1, 2, 2, 0]
    assert [line for line, _ in rows.numbered()] == [rows.numbered_at(position)[0] for position in range(3)]
    for position in (3, -4):
        with pytest.raises(IndexError):
            at(rows, position)


@pytest.mark.parametrize("text", ["", "\n\n", "\r\n"])
def test_an_empty_file_has_no_rows(tmp_path: Path, text: str) -> None:
    rows = RowFile(write(tmp_path / "rows.jsonl", text))
    assert list(streamed(rows)) == []
    assert len(rows) == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"i": ', "not JSON"),
        ("[1]", "not list"),
        ("<html>", "not JSON"),
        ('{"a": 1} {"b": 2}', "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str | bytes, reason: str) -> None:
    raw = line.encode() if isinstance(line, str) else line
    rows = RowFile(write(tmp_path / "rows.jsonl", b'{"i": 0}\n\n' + raw + b"\n"))
    stream = streamed(rows)
    assert next(stream) == {"i": 0}
    for read in (lambda: next(stream), lambda: at(rows, 1)):
        with pytest.raises(DataError, match=reason) as caught:
            read()
        assert (caught.value.path, caught.value.line) == (str(rows.path), 3)
        assert str(caught.value).startswith(f"{rows.path}:3: ")
        assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nope.jsonl", tmp_path):
        with pytest.raises(DataError, match=re.escape(str(path))):
            RowFile(path)


def test_a_file_that_cannot_be_read_is_named() -> None:
    path = "/proc/self/mem"  # reading it from its beginning fails, for root too
    for read in (lambda: next(streamed(RowFile(path))), lambda: len(RowFile(path))):
        with pytest.raises(DataError) as caught:
            read()
        assert caught.value.path == path


def test_the_first_row_needs_no_index(tmp_path: Path, cache: Path) -> None:
    rows = RowFile(write(tmp_path / "rows.jsonl", '{"i": 0}\nbroken\n'))
    assert next(streamed(rows)) == {"i": 0}
    assert not cache.exists()


def test_the_index_is_built_once_and_follows_the_file(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "rows.jsonl", '{"i": 0}\n')
    assert len(RowFile(path)) == 1
    (index,) = (cache / "rows").iterdir()
    before = index.stat().st_ino
    assert len(RowFile(path)) == 1
    assert index.stat().st_ino == before
    write(path, '{"i": 0}\n\n{"i": 1}\n')
    assert (
        [row["i"] for row in streamed(RowFile(path))] == [0, 1] == [at(RowFile(path), n)["i"] for n in (0, 1)]
    )
    assert list((cache / "rows").iterdir()) == [index]


@pytest.mark.parametrize("damage", [b"", b"short", bytes(64), None])
def test_a_damaged_index_is_built_anew(tmp_path: Path, cache: Path, damage: bytes | None) -> None:
    path = write(tmp_path / "rows.jsonl", '{"i": 0}\n{"i": 1}\n')
    assert len(RowFile(path)) == 2
    (index,) = (cache / "rows").iterdir()
    index.write_bytes(index.read_bytes()[:-8] if damage is None else damage)
    assert at(RowFile(path), 1) == {"i": 1}


def test_without_a_cache_the_index_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMGATE_CACHE", str(write(tmp_path / "file", "")))
    rows = RowFile(write(tmp_path / "rows.jsonl", '\n{"i": 0}\n{"i": 1}\n'))
    assert len(rows) == 2
    assert rows.numbered_at(1) == (3, {"i": 1})


def test_a_file_that_changes_under_random_access_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", '{"i": 0}\n{"i": 1}\n')
    rows = RowFile(path)
    assert at(rows, 0) == {"i": 0}
    with path.open("a") as file:
        file.write('{"i": 2}\n')
    with pytest.raises(DataError, match="changed"):
        at(rows, 0)


def test_a_file_of_the_same_size_has_changed_too(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", '{"i": 0}\n')
    rows = RowFile(path)
    assert at(rows, 0) == {"i": 0}
    path.write_text('{"i": 1}\n')
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match="changed"):
        at(rows, 0)


def test_an_object_closes_its_file(tmp_path: Path) -> None:
    rows = RowFile(write(tmp_path / "rows.jsonl", '{"i": 0}\n'))
    assert at(rows, 0) == {"i": 0}
    assert rows.path in open_files()
    del rows
    assert tmp_path / "rows.jsonl" not in open_files()


def open_files() -> set[Path]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(link.readlink())
    return found


def test_threads_share_it_and_it_pickles_as_its_path(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "".join(f'{{"i": {i}}}\n' for i in range(200)))
    rows = RowFile(path)
    wrong: list[Any] = []

    def read() -> None:
        wrong.extend(i for i in range(200) if at(rows, i) != {"i": i})

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert at(pickle.loads(pickle.dumps(rows)), 7) == {"i": 7}


def test_builders_at_once_all_get_a_whole_index(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "rows.jsonl", '{"i": 0}\n' * 50_000)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: len(RowFile(path)), range(16))) == [50_000] * 16
    assert len(list((cache / "rows").iterdir())) == 1


def nested() -> st.SearchStrategy[Any]:
    plain = (
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
    )
    return st.recursive(
        plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
    )


@settings(max_examples=60)
@given(st.dictionaries(st.text(), nested()))
def test_no_value_changes_on_the_way(row: dict[str, Any]) -> None:
    line = codec.dumps(row, sort_keys=True)
    assert codec.loads_object(line) == row
    assert codec.dumps(codec.loads_object(line), sort_keys=True) == line


def test_what_orjson_would_change_or_refuse() -> None:
    big = 2**64 + 1
    assert codec.loads_object(b'{"a": %d}' % big) == {"a": big}
    assert codec.loads_object(b'{"a": Infinity}') == {"a": float("inf")}
    assert orjson.loads(b'{"a": %d}' % big) != {"a": big}


@settings(max_examples=60)
@given(st.lists(st.sampled_from([b'{"a": 1}', b"", b"  ", b'{"b": "\\n"}', b"\r"]), max_size=20))
def test_any_mix_of_lines_has_the_same_rows_both_ways(tmp_path_factory: Any, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("mix") / "rows.jsonl"
    rows = RowFile(write(path, b"\n".join(lines)))
    assert [rows.numbered_at(i) for i in range(len(rows))] == list(numbered(lines))


def numbered(lines: list[bytes]) -> Iterator[tuple[int, Any]]:
    return ((number, orjson.loads(line)) for number, line in enumerate(lines, 1) if line.strip())
