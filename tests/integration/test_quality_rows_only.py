"""`gymgate check --rows-only`: the packaged rows, read without running them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gymgate.cli import cli
from gymgate.quality.record.storage import load_record, save_record
from support.checks import PARIS
from support.faulty import with_recordings

pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]  # the first use of a release installs it


def check(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["check", *arguments])


def test_rows_alone_are_read_and_added_to_the_record_that_is_there(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, PARIS)
    data = config.parents[1] / "data"
    rows = (data / "example.jsonl").read_text()
    (data / "train.jsonl").write_text(rows + rows.splitlines()[0])
    (data / "validation.jsonl").write_text(rows)
    store = tmp_path / "records"
    done = check(str(config), "--rows-only", "--record", str(store), "--clean-rows")
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "faulty: 7 rows; duplicates: 1; answers in prompts: not checked; rows in several splits: 2",
        "  1 of 7 rows equal an earlier row of their file: train:1 = train:3",
        "  rows in several splits: 2: train:1 = validation:1; train:2 = validation:2",
    ]
    path = store / "config" / "faulty-0.7.0.json"
    record = load_record(path)
    assert record is not None
    assert (record.verdict, record.detail) == ("incomplete", "only its rows were read")
    measured = record.model_copy(update={"verdict": "match", "machine": "here", "data": None})
    save_record(path, measured)
    (data / "train.jsonl").write_text(rows)
    done = check(str(config), "--rows-only", "--record", str(store), "--json")
    assert done.exit_code == 0
    again = load_record(path)
    assert again is not None
    assert again.data is not None
    assert (again.verdict, again.machine, again.data.duplicates) == ("match", "here", 0)
    assert json.loads(done.stdout) == [again.model_dump(mode="json")]


def test_rows_of_ones_own_are_read_instead_of_the_packaged_ones(tmp_path: Path) -> None:
    (path := tmp_path / "train.jsonl").write_text('{"a": 1}\n{"a": 1}\n')
    done = check("mcqa", "--rows-only", "--rows-file", str(path))
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1] == (
        "  1 of 2 rows equal an earlier row of their file: train:1 = train:2"
    )


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name / "train.jsonl" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"a": 1}\n' * 2)
    done = check("mcqa", "--rows-only", *(f"--rows-file={path}" for path in paths))
    assert done.stdout.startswith("mcqa: 4 rows; duplicates: 2; ")
    assert f"{tmp_path}/a/train:1 = {tmp_path}/a/train:2" in done.stdout


def test_rows_only_adds_to_the_record_that_ships(tmp_path: Path) -> None:
    assert check("multichallenge", "--rows-only", "--record", str(tmp_path)).exit_code == 0
    record = load_record(tmp_path / "resources_servers" / "multichallenge-0.7.0.json")
    assert record is not None
    assert record.measured
    assert record.data is not None
    assert record.data.duplicates == 2


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["mcqa", "--rows-file", "ROWS"], "--rows-file gives rows for --rows-only; give both"),
        (["mcqa", "calendar", "--rows-only", "--rows-file", "ROWS"], "--rows-file is for one environment"),
        (["mcqa", "--rows-only", "--rows-file", "no.jsonl"], "no file of rows at 'no.jsonl'"),
        (["mcqa", "--rows-only", "--rows-file", "ROWS", "--record", "r"], "a record is of the packaged rows"),
        (["mcqa", "--rows-only", "-b", "http://h/v1"], "--rows-only runs no row; leave -b out"),
    ],
)
def test_options_that_mean_nothing_beside_rows_only_are_refused(
    tmp_path: Path, arguments: list[str], wrong: str
) -> None:
    (path := tmp_path / "rows.jsonl").write_text("{}")
    done = check(*(str(path) if each == "ROWS" else each for each in arguments))
    assert done.exit_code != 0
    assert wrong in str(done.exception)
