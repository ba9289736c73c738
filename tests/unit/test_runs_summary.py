"""Stored runs as numbers in a script or a notebook: those of `gymgate aggregate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_rollout_notebook import HOSTILE, Parsed
from test_runs_aggregate import line, write_run

import gymgate
from gymgate.cli import cli
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.stored.gym_rollouts import export_rollouts


def stored(path: Path, environment: str = "mcqa", *, planned: int = 4, **settings: Any) -> Path:
    lines = [
        {**line(key, repeat, reward), "environment": environment}
        for key, repeat, reward in ((0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.5))
    ]
    return write_run(path, lines, extent={"rollouts": planned}, **settings)


def test_it_is_what_aggregate_prints(tmp_path: Path) -> None:
    run = stored(tmp_path)
    found = gymgate.summarize(str(run))
    printed = json.loads(CliRunner().invoke(cli, ["aggregate", str(run), "--json"]).stdout)
    assert [dict(row) for row in found.environments] == printed["environments"]
    assert [*found.notes] == printed["notes"]
    assert found.environments[0]["mean_reward"] == 0.5
    assert any("1 of 4" in note for note in found.notes)
    failed = {
        **line(1, 1, None),
        "environment": "mcqa",
        "status": "failed",
        "final": True,
        "error": {"kind": "policy"},
    }
    (run / "failures.jsonl").write_text(json.dumps(failed) + "\n")
    assert [gymgate.summarize(run, failed_as=what).environments[0]["mean_reward"] for what in (None, 0)] == [
        0.5,
        0.375,
    ]
    [chosen] = gymgate.summarize(run, ks=(2,)).environments
    assert chosen["scored_tasks"] == 1
    assert "pass@2" in chosen


def test_a_notebook_shows_a_table_and_the_notes(tmp_path: Path) -> None:
    shown = Parsed(gymgate.summarize(stored(tmp_path))._repr_html_())
    assert shown.tags.count("tr") == 2
    for text in ("mcqa", "mean_reward", "0.5", "pass@1", "1 of 4"):
        assert text in shown.text
    assert "truncated" not in shown.text, "there are none"
    two = stored(tmp_path / "one"), stored(tmp_path / "two", "calendar")
    shown = Parsed(gymgate.summarize(*two)._repr_html_())
    assert "6 rollouts: " in shown.text, "the account of all"


def test_what_is_hostile_is_text_of_bounded_size(tmp_path: Path) -> None:
    html = gymgate.summarize(stored(tmp_path, HOSTILE))._repr_html_()
    assert {*Parsed(html).tags} == {"div", "table", "thead", "tbody", "tr", "th", "td", "p"}
    assert Parsed(html).attributes == []
    html.encode()
    many = [dict.fromkeys(("environment", "tasks", "rollouts", "account"), "x" * 10_000)] * 10_000
    notes = ["n" * 10_000] * 10_000
    for row in many:
        row |= {"scored_tasks": row["tasks"], "no_answer": 0}
        row |= dict.fromkeys(("failed", "masked", "unscored", "truncated", "overflowed"), 0)
    html = gymgate.RunSummary(many, replayed=True, notes=notes)._repr_html_()
    assert len(html) < 5_000_000
    assert "9500 environments are left out" in html
    assert "notes are left out" in html


def test_a_path_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(gymgate.DataError):
        gymgate.summarize(tmp_path)
    (tmp_path / "rollouts.jsonl").touch()
    with pytest.raises(gymgate.DataError):
        gymgate.summarize(tmp_path / "rollouts.jsonl")


def test_an_export_that_cannot_be_written_leaves_nothing_beside_it(tmp_path: Path) -> None:
    run, output = write_run(tmp_path / "run", []), tmp_path / "taken"
    output.mkdir()
    with pytest.raises(gymgate.DataError):
        export_rollouts(read_runs([run]), output)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken"}
