"""What commands print with `--json` is what their types say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_cli_options import commands

from gymgate.cli import cli
from gymgate.runs.counted.counts import RolloutCounts
from support.json_output import OUTPUTS, read_output

LINES = "".join(
    json.dumps(
        {
            **{"row_key": "0123456789abcdef", "occurrence": 0, "repeat": repeat, "seed": None, "task": 0},
            **{"source": "s", "line": 1, "environment": "e", "agent": "a", "status": "completed"},
            **{"reward": reward, "error": None, "result": {}, "calls": []},
        }
    )
    + "\n"
    for repeat, reward in enumerate((1.0, 0.0))
)


def test_every_command_with_json_has_a_type() -> None:
    found = {name for name, command in commands() if any("--json" in each.opts for each in command.params)}
    assert found == {*OUTPUTS}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("aggregate", "run.jsonl"),
        ("cache", ""),
        ("cache clean", "--unused-for 0m"),
        ("compare", "run.jsonl other.jsonl"),
        ("data blend", "rows.jsonl -o blended.jsonl"),
        ("doctor", ""),
        ("info", "mcqa"),
        ("info", "terminal_bench_2_1"),
        ("list", ""),
        ("list", "--kind agent"),
        ("ps", ""),
    ],
)
def test_the_output_is_as_typed(
    command: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GYMGATE_OFFLINE", "1")
    (tmp_path / "cache" / "rows").mkdir(parents=True)
    for name, text in {
        "run.jsonl": LINES,
        "other.jsonl": LINES.replace("0.0", "1.0"),
        "rows.jsonl": '{"responses_create_params": {"input": "a"}}\n',
    }.items():
        Path(name).write_text(text)
    done = CliRunner().invoke(cli, [*command.split(), *arguments.split(), "--json"])
    assert done.exit_code == 0 or command == "doctor", done.output
    assert read_output(command, done.stdout)


def test_a_table_has_every_count(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(LINES)
    done = CliRunner().invoke(cli, ["aggregate", str(tmp_path / "run.jsonl"), "--json"])
    [row] = read_output("aggregate", done.stdout)["environments"]
    assert {name: row[name] for name in RolloutCounts().columns()} == {
        **dict.fromkeys(RolloutCounts().columns(), 0),
        "rollouts": 2,
        "scored": 2,
    }
