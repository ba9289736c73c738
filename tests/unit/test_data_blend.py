"""`gymgate data blend`: files of rows mixed by weight, lines verbatim, whole files only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymgate.cli import main
from gymgate.core.errors import ConfigError, DataError
from gymgate.gym.preparation import BlendFile, blend_files, parse_blend_file
from gymgate.gym.row_sources import open_rows
from gymgate.rollouts import RowFile

BIG = 123456789012345678901234567890


def rows(path: Path, name: str, count: int, agent: str | None = None) -> Path:
    """Rows whose spacing and long number a parser and writer would change."""
    reference = f'"agent_ref": {{"name": "{agent}"}}, ' if agent else ""
    line = '{%s"responses_create_params":  {"input": "%s %d"}, "big": %d}'
    path.write_text("\n".join(line % (reference, name, index, BIG) for index in range(count)))
    return path


def test_lines_are_verbatim_in_proportion_and_the_seed_decides(tmp_path: Path) -> None:
    a, b = rows(tmp_path / "a.jsonl", "a", 400), rows(tmp_path / "b.jsonl", "b", 400)
    out = tmp_path / "deep" / "out.jsonl"
    done = blend_files([BlendFile(a, 0.7), BlendFile(b, 0.3)], out, rows=400, seed=3)
    assert done.rows == 400
    assert 240 < done.taken[str(a)] < 320
    assert done.taken[str(a)] + done.taken[str(b)] == 400
    written = out.read_text().splitlines()
    assert {*written} <= {*a.read_text().splitlines(), *b.read_text().splitlines()}
    assert [line for line in written if '"a ' in line] == a.read_text().splitlines()[: done.taken[str(a)]]
    again = blend_files([BlendFile(a, 0.7), BlendFile(b, 0.3)], tmp_path / "again.jsonl", rows=400, seed=3)
    other = blend_files([BlendFile(a, 0.7), BlendFile(b, 0.3)], tmp_path / "other.jsonl", rows=400, seed=4)
    assert done.sha256 == again.sha256 != other.sha256
    assert len(open_rows(str(out), environment=None)) == 400


def test_a_cap_of_a_file_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    a, b = rows(tmp_path / "a.jsonl", "a", 50), rows(tmp_path / "b.jsonl", "b", 20)
    done = blend_files([BlendFile(a, 9.0, cap=5), BlendFile(b)], tmp_path / "out.jsonl")
    assert done.taken == {str(a): 5, str(b): 20}


def test_a_bad_row_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    a, bad, out = rows(tmp_path / "a.jsonl", "a", 2), tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    bad.write_text('{"responses_create_params": {"input": "x"}}\n\n{"question": "1+1"}\n')
    out.write_text("before")
    with pytest.raises(DataError, match=r"bad\.jsonl:3: .*responses_create_params.*gymgate data prepare"):
        blend_files([BlendFile(a), BlendFile(bad)], out)
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "bad.jsonl", "out.jsonl"]


def test_an_output_that_is_a_part_is_refused(tmp_path: Path) -> None:
    a = rows(tmp_path / "a.jsonl", "a", 2)
    with pytest.raises(ConfigError, match=r"a\.jsonl"):
        blend_files([BlendFile(a)], a)


def test_parts_are_written_with_weight_and_cap(tmp_path: Path) -> None:
    a = rows(tmp_path / "a.jsonl", "a", 1)
    colon = rows(tmp_path / "b:0.5", "b", 1)
    assert parse_blend_file(str(a)) == BlendFile(a)
    assert parse_blend_file(f"{a}:0.7") == BlendFile(a, 0.7)
    assert parse_blend_file(f"{a}:2:100") == BlendFile(a, 2.0, 100)
    assert parse_blend_file(str(colon)) == BlendFile(colon)
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        parse_blend_file(str(tmp_path / "missing.jsonl:0.7"))


def test_the_command_blends_and_warns_of_rows_without_an_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = rows(tmp_path / "a.jsonl", "a", 6, "one"), rows(tmp_path / "b.jsonl", "b", 6)
    out = tmp_path / "out.jsonl"
    main(["data", "blend", f"{a}:0.5", f"{b}:0.5", "-o", str(out), "-n", "8", "--seed", "1", "--json"])
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["rows"] == 8 == len(RowFile(out))
    assert f"{report['taken'][str(b)]} rows " in said.err
    assert "agent_ref" in said.err


def test_a_directory_of_prepared_files_is_not_rows(tmp_path: Path) -> None:
    rows(tmp_path / "train.jsonl", "a", 1)
    with pytest.raises(ConfigError, match=r"/train\.jsonl"):
        open_rows(str(tmp_path), environment=None)
