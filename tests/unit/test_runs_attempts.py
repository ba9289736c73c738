"""Stored runs as attempts: what is not known stays unknown, no seed is not seed 0, and records of another form are named."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from test_results_growing import append, failure, line

from gymgate.cli.aggregate import command as aggregate
from gymgate.cli.compare import command as compare_command
from gymgate.cli.export import command as export
from gymgate.cli.report import command as report
from gymgate.core.errors import DataError, GymgateError
from gymgate.results.compare import compare
from gymgate.results.growing import GrowingReport
from gymgate.results.report_data import CALLS, TOKENS, ReportData
from gymgate.results.rescore import StoredRun
from gymgate.rollouts.row import TaskKey, make_row, row_key
from gymgate.runs.collected.store import open_run
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.metrics import summary_rows, task_rows
from gymgate.runs.counted.summary import summarize
from gymgate.runs.stored import rows
from gymgate.runs.stored.attempts import Attempt, task_name
from gymgate.runs.stored.gym_rollouts import RolloutNumbers
from gymgate.runs.stored.rows import RowReader
from gymgate.runs.stored.score import score_of

CALL = {"model_server": "policy_model", "status_code": 200, "started_s": 0.5, "duration_s": 1.0, "index": 0}
CALL |= {"dialect": "chat", "usage": {"input_tokens": 3, "output_tokens": 7}}
SETTINGS = {
    "sources": ["s"],
    "nemo_gym": "0.7.0",
    "environments": [{"name": "e", "overrides": {}}],
    "judges": {"j": {"type": "http", "model": "m"}},
    "policy": {"type": "http", "model": "m"},
    "limits": {"timeout_s": 60.0},
}


def stored(
    path: Path, lines: list[dict[str, Any]], failures: list[dict[str, Any]] | None = None, **extent: Any
) -> Path:
    path.mkdir(parents=True)
    whole = {"rollouts": len(lines), "rows": 1, "repeats": 9, "seeds": None, "shard": [1, 1], **extent}
    described = {"format": 1, "settings": SETTINGS, "extent": whole, "created": 1_700_000_000}
    (path / "run.json").write_bytes(orjson.dumps(described))
    for name, values in (("rollouts.jsonl", lines), ("failures.jsonl", failures or [])):
        append(path / name, b"".join(orjson.dumps(value) + b"\n" for value in values))
    return path


def whole_line(key: int, repeat: int, **fields: Any) -> dict[str, Any]:
    known = {"id": f"{key}{repeat}", "calls": [CALL], "timing": {"total_s": 2.0}, "finished": 1.7e9}
    return line(key, repeat, **{**known, "metrics": {"m": 1}, "reward_parts": {"p": 0.5}, **fields})


def test_no_seed_is_not_seed_0(tmp_path: Path) -> None:
    """A run without seeds that was extended with `--seeds 2` has three rollouts of a row, in whatever order they are read."""
    seedless, seeded = (
        line(0, 0, seed=None, reward=1.0),
        [line(0, 0, seed=seed, reward=0.0) for seed in (0, 1)],
    )
    both = stored(tmp_path / "both", [seedless, *seeded])
    other = stored(tmp_path / "other", [*seeded[::-1], {**seedless, "reward": 0.5}])
    for first, second, difference in ((both, other, -0.5 / 3), (other, both, 0.5 / 3)):
        [row] = compare(read_runs([first]).tasks, read_runs([second]).tasks).rows
        assert (row["pairs"], row["difference"]) == (3, pytest.approx(difference))
    runs = read_runs([both])
    numbering = RolloutNumbers(runs)
    assert [numbering.of(attempt)["_ng_rollout_index"] for attempt in runs.rollouts()] == [0, 1, 2]
    alone, seeds = stored(tmp_path / "alone", [seedless]), stored(tmp_path / "seeds", seeded)
    with pytest.raises(DataError, match="seeds"):
        compare(read_runs([alone]).tasks, read_runs([seeds]).tasks)


def test_what_is_not_known_is_no_zero(tmp_path: Path) -> None:
    """NeMo Gym's rollouts say nothing of calls and time; one call of an own rollout has no usage; a task failed."""
    gym = tmp_path / "gym.jsonl"
    named = {"agent_ref": {"name": "a"}, "_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0}
    append(gym, orjson.dumps(named) + b"\n")
    unknown = {"mean_calls": None, "mean_output_tokens": None, "mean_seconds": None}
    [row] = task_rows(read_runs([gym]).tasks)
    assert row.items() >= unknown.items()
    assert [*_charts(gym)[TOKENS]] == []
    assert (
        CliRunner().invoke(export, [str(gym), "--to", "dataset", "-o", str(tmp_path / "d.jsonl")]).exit_code
        == 0
    )
    flat = orjson.loads((tmp_path / "d.jsonl").read_bytes())
    assert (flat["calls"], flat["output_tokens"], flat["seconds"]) == (None, None, None)

    silent = {**CALL, "usage": {}}
    run = stored(
        tmp_path / "run",
        [whole_line(0, 0), whole_line(0, 1, calls=[silent])],
        [failure(1, 0, final=True)],
    )
    known, failed = task_rows(read_runs([run]).tasks)
    assert (known["mean_calls"], known["mean_output_tokens"], known["mean_seconds"]) == (1.0, 7.0, 2.0)
    assert failed.items() >= unknown.items()
    assert [*_charts(run)[TOKENS]] == [7.0]


def _charts(path: Path) -> dict[str, Any]:
    data = ReportData(tasks=1, per_task=1)
    read_runs([path], see=data.add)
    return {**data.charts}


def _parts(path: Path) -> list[Any]:
    return GrowingReport(path).parts()[1]


def test_failures_count_alike_in_a_directory_and_a_file(tmp_path: Path) -> None:
    """In the table, a comparison, a report's charts and table of failures, and an export."""
    base = stored(tmp_path / "base", [line(0, repeat, reward=1.0) for repeat in range(4)])
    finished = [line(0, repeat, reward=1.0) for repeat in range(2)]
    lost = [failure(0, repeat, final=True) for repeat in (2, 3)]
    directory = stored(tmp_path / "run", finished, lost)
    file = tmp_path / "file.jsonl"
    append(file, b"".join(orjson.dumps(value) + b"\n" for value in [*finished, *lost]))
    for run in (directory, file):
        [row] = compare(read_runs([base]).tasks, read_runs([run]).tasks).rows
        assert (row["pairs"], row["left_out"], row["failed_second"]) == (2, 2, 2)
        [metrics] = summary_rows(read_runs([run]).tasks)
        assert (metrics["rollouts"], metrics["failed"], metrics["scored"]) == (4, 2, 2)
        parts = _parts(run)
        assert len(_charts(run)[CALLS]) == 2
        assert {"heading": "Failed attempts"} in parts
        output = tmp_path / "flat.jsonl"
        done = CliRunner().invoke(export, [str(run), "--to", "dataset", "-o", str(output)])
        assert done.exit_code == 0, done.output
        rows = [orjson.loads(text) for text in output.read_bytes().splitlines()]
        assert [row["status"] for row in rows] == ["completed"] * 2 + ["failed"] * 2
        assert metrics["account"] == "4 rollouts: 2 right, 0 wrong; 2 failed (2 by timeout)"


def test_a_runs_own_file_of_rollouts_is_the_run(tmp_path: Path) -> None:
    """With its failures, its plan and its settings; a copy elsewhere is rollouts and no more."""
    lost = [failure(0, repeat, final=True) for repeat in (2, 3)]
    run = stored(tmp_path / "run", [line(0, repeat) for repeat in range(2)], lost, rollouts=5)
    file = run / "rollouts.jsonl"
    by_file, by_directory = summarize(file), summarize(run)
    assert by_file == by_directory
    assert (by_file.environments[0]["rollouts"], by_file.environments[0]["failed"]) == (4, 2)
    assert StoredRun(file).settings == SETTINGS
    (copy := tmp_path / "rollouts.jsonl").write_bytes(file.read_bytes())
    assert summarize(copy).environments[0]["failed"] == 0


def test_a_task_of_an_export_is_one_row_whatever_its_line(tmp_path: Path) -> None:
    """Of two files that have other rows in the same lines, and of a file that got a row in front."""
    other_file = stored(tmp_path / "a", [line(1, 0, line=1, source="a.jsonl")])
    lines = [line(2, 0, line=1, source="b.jsonl"), line(3, 1, line=1, source="b.jsonl")]
    grown = stored(tmp_path / "b", [*lines, line(2, 1, line=2, source="b.jsonl")])
    output = tmp_path / "flat.jsonl"
    done = CliRunner().invoke(
        export, [str(other_file), str(grown), "--to", "dataset", "-o", str(output), "--overlap", "first"]
    )
    assert done.exit_code == 0, done.output
    rows = [orjson.loads(text) for text in output.read_bytes().splitlines()]
    keys: dict[str, set[str]] = {}
    for row in rows:
        keys.setdefault(row["task"], set()).add(row["row_key"])
    assert len(rows) == 4
    assert [len(several) for several in keys.values()] == [1, 1, 1]


def test_rows_that_differ_only_in_what_nemo_gym_added_stay_apart(tmp_path: Path) -> None:
    """Read again by their lines, or, once those have moved, by their order."""
    source = tmp_path / "rows.jsonl"
    task: dict[str, Any] = {"responses_create_params": {"input": "x"}}
    rows: list[dict[str, Any]] = [{**task, "_ng_task_id": {"taskset": "t", "task_id": name}} for name in "AB"]
    source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    places = [(TaskKey("e", row_key(row), number), number + 1) for number, row in enumerate(rows)]
    assert [RowReader().read(str(source), *place) for place in places] == rows
    moved = [{"responses_create_params": {"input": "y"}}] * 5 + rows
    source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in moved))
    assert [RowReader().read(str(source), *place) for place in places] == rows


def test_shards_that_were_run_differently_are_not_complete(tmp_path: Path) -> None:
    for number, repeats in ((1, 4), (2, 2)):
        lines = [line(number, repeat) for repeat in range(repeats)]
        stored(tmp_path / f"shard-{number}-of-2", lines, repeats=repeats, shard=[number, 2])
    [note] = read_runs([tmp_path]).missing
    assert "shard-1-of-2" in note
    assert "shard-2-of-2" in note
    assert CliRunner().invoke(aggregate, [str(tmp_path), "--complete"]).exit_code == 1


def test_an_export_of_records_is_read_as_the_run(tmp_path: Path) -> None:
    run = stored(tmp_path / "run", [whole_line(0, repeat) for repeat in range(3)])
    output = tmp_path / "x.jsonl"
    done = CliRunner().invoke(export, [str(run), "--to", "jsonl", "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert output.read_bytes() == (run / "rollouts.jsonl").read_bytes()
    assert summary_rows(read_runs([output]).tasks) == summary_rows(read_runs([run]).tasks)


@pytest.mark.parametrize(("form", "left_out"), [("jsonl", True), ("dataset", False)])
def test_an_export_says_how_many_failed_rollouts_it_leaves_out(
    tmp_path: Path, form: str, left_out: bool
) -> None:
    lost = [failure(0, repeat, final=True) for repeat in (2, 3)]
    run = stored(tmp_path / "run", [line(0, repeat) for repeat in range(2)], lost)
    done = CliRunner().invoke(export, [str(run), "--to", form, "-o", str(tmp_path / "x.jsonl")])
    assert done.exit_code == 0, done.output
    assert ("2 that failed left out" in done.stderr) == left_out


def test_rows_of_a_dataset_that_was_given_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = make_row({"responses_create_params": {"input": "hi"}}, "hf:one", 1)
    monkeypatch.setattr(rows, "open_rows", lambda source, environment: [row])
    lines = [line(0, 0, row_key=row.key, source="hf:one", line=1)]
    command = [str(stored(tmp_path / "run", lines)), "--to", "rows", "-o", str(tmp_path / "x.jsonl")]
    assert "--dataset hf:one" in str(CliRunner().invoke(export, command).exception)
    done = CliRunner().invoke(export, [*command, "--dataset", "hf:one"])
    assert done.exit_code == 0, done.output
    assert "hi" in (tmp_path / "x.jsonl").read_text()


@pytest.mark.parametrize("name", ["total_s", "started_s", "finished"])
def test_a_time_that_no_calendar_has_is_refused(tmp_path: Path, name: str) -> None:
    """Exports that write it as a date broke off with an error of Python's."""
    fields = {"total_s": {"timing": {name: 1e13}}, "started_s": {"calls": [{**CALL, name: 1e13}]}}
    run = stored(tmp_path / "run", [whole_line(0, 0, **fields.get(name, {name: 1e13}))])
    with pytest.raises(DataError, match=name):
        [*read_runs([run]).rollouts()]


def test_a_clock_that_was_before_1970_is_read_again(tmp_path: Path) -> None:
    run = stored(tmp_path / "run", [whole_line(0, 0, finished=-5.0)])
    assert [attempt.finished for attempt in read_runs([run]).rollouts()] == [-5.0]


@pytest.mark.parametrize("created", ["1", True, 1e13])
def test_a_date_of_another_form_is_refused(tmp_path: Path, created: Any) -> None:
    """The report ended with a TypeError."""
    run = stored(tmp_path / "run", [whole_line(0, 0)])
    described = orjson.loads((run / "run.json").read_bytes()) | {"created": created}
    (run / "run.json").write_bytes(orjson.dumps(described))
    with pytest.raises(DataError, match="created"):
        read_runs([run])


WRONG = [None, "", "x", -1, 0.5, 1e300, 2**70, True, [], [1], {}, {"a": 1}, [{"usage": 5}], [None]]


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [prefix] if prefix else []
    for name, item in items:
        found += _paths(item, (*prefix, name))
    return found


def _mutated(value: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """Another value, or nothing, at one place of a record."""
    value = copy.deepcopy(value)
    *parents, name = dice.choice(_paths(value))
    place: Any = value
    for parent in parents:
        place = place[parent]
    if dice.random() < 0.2:
        del place[name]
    else:
        place[name] = dice.choice(WRONG)
    return value


@pytest.mark.parametrize("seed", range(6))
def test_records_of_another_form_end_in_one_line(tmp_path: Path, seed: int) -> None:
    """A mutated line or description: each command works, or raises an error of ours on one line, of a record with its line."""
    dice = random.Random(seed)
    lines = [whole_line(key, repeat) for key in range(2) for repeat in range(2)]
    good = stored(tmp_path / "good", lines, [failure(0, 2, final=True), failure(1, 3, final=False)])
    named = {"agent_ref": {"name": "a"}, "_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0}
    result = {**lines[0]["result"], **named}
    out, refused = tmp_path / "out", 0
    for number in range(60):
        run = tmp_path / f"run{number}"
        kind = dice.choice(["run.json", "rollouts.jsonl", "failures.jsonl", "gym", "gym_failures"])
        stored(run, lines, [failure(0, 2, final=True, usage={"policy_model": {"calls": 1}}, seconds=1.0)])
        path = run / kind
        if kind.startswith("gym"):
            run = tmp_path / f"run{number}.jsonl"
            path = run if kind == "gym" else tmp_path / f"run{number}_failures.jsonl"
            append(run, orjson.dumps(result) + b"\n")
            failed = {**named, "_ng_failure_class": "timeout", "_ng_failure_message": "m"}
            append(tmp_path / f"run{number}_failures.jsonl", orjson.dumps(failed) + b"\n")
        first, *rest = path.read_bytes().splitlines(keepends=True)
        mutated = orjson.loads(first)
        for _ in range(dice.choice([1, 1, 2])):
            mutated = _mutated(mutated, dice) or {"a": 1}
        path.write_bytes(_dumps(mutated) + b"".join(rest))
        for command, arguments in (
            (aggregate, [str(run), "-o", str(out / "tasks.jsonl"), "--price", "policy_model=1,1"]),
            (compare_command, [str(good), str(run), "-o", str(out / "c.html")]),
            (compare_command, [str(run), str(good), "--json"]),
            (report, [str(run), "-o", str(out / "r.html")]),
            (export, [str(run), "--to", "dataset", "-o", str(out / "d.jsonl")]),
            (export, [str(run), "--to", "jsonl", "-o", str(out / "l.jsonl")]),
            (export, [str(run), "--to", "gym", "-o", str(out / "g.jsonl")]),
            (export, [str(run), "--to", "atif", "-o", str(out / f"atif{number}")]),
            (export, [str(run), "--to", "rows", "-o", str(out / "rows.jsonl")]),
        ):
            error = CliRunner().invoke(command, arguments).exception
            refused += _checked(error, mutated, (command.name, *arguments))
        for read in (
            lambda run=run: summarize(run),
            lambda run=run: _parts(run),
            lambda run=run: StoredRun(run),
        ):
            refused += _checked(_raised(read), mutated, read)
        if run.is_dir():
            refused += _checked(_raised(lambda run=run: _resumed(run)), mutated, "resume")
    assert refused > 100


def _dumps(value: Any) -> bytes:
    import json

    return json.dumps(value).encode() + b"\n"


def _resumed(run: Path) -> None:
    with open_run(run, SETTINGS, {}):
        pass


def _raised(read: Any) -> BaseException | None:
    try:
        read()
    except Exception as error:
        return error
    return None


def _checked(error: BaseException | None, record: Any, command: Any) -> bool:
    if error is None or isinstance(error, SystemExit):
        return False
    assert isinstance(error, GymgateError), (command, record, repr(error))
    assert len(str(error).splitlines()) == 1, (command, record)
    return True


@pytest.mark.parametrize(
    "field",
    [{"row_key": 5}, {"repeat": -1}, {"calls": {"a": 1}}, {"error": "x"}, {"timing": [1]}, {"status": "x"}],
)
def test_a_field_of_another_form_is_named_with_its_file_and_line(
    tmp_path: Path, field: dict[str, Any]
) -> None:
    run = stored(tmp_path / "run", [whole_line(0, 0), {**whole_line(0, 1), **field}])
    with pytest.raises(DataError) as raised:
        read_runs([run])
    assert (raised.value.path, raised.value.line) == (str(run / "rollouts.jsonl"), 2)
    assert next(iter(field)) in str(raised.value)


def test_a_refused_call_samples_nothing() -> None:
    refused = {**CALL, "status_code": 400, "usage": {}}
    broken = {**refused, "status_code": 500}
    counts = [
        score_of(Attempt.read(whole_line(0, 0, calls=[CALL, call]), Path("r"), 1)).output_tokens
        for call in (refused, broken)
    ]
    assert counts == [7, None]


def test_a_failure_needs_no_error_and_an_equal_row_has_its_number() -> None:
    attempt = Attempt.read(whole_line(0, 0, status="failed", occurrence=1), Path("r"), 1)
    name = task_name(attempt.environment, attempt.line, attempt.occurrence)
    assert (attempt.has_failed, name) == (True, "e:1#2")
