"""The table of results on terminals of several widths, rendered on a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from gymgate.cli.output import print_table
from support.terminal import terminal

LINE = {"occurrence": 0, "seed": None, "agent": "a", "source": "rows", "error": None, "result": None}
LONG = "a_long_name_of_an_environment_that_nobody_can_shorten"


def write_run(path: Path, environments: Sequence[str], statuses: Sequence[str]) -> Path:
    """A run of eight rows per environment, sixteen rollouts each."""
    path.mkdir()
    described = {"format": 1, "settings": {"policy": {"type": "replay"}}, "extent": {}, "created": 0}
    (path / "run.json").write_text(json.dumps(described))
    with (path / "rollouts.jsonl").open("wb") as file:
        for environment in environments:
            for number in range(8 * 16):
                row, repeat = divmod(number, 16)
                status = statuses[number % len(statuses)]
                reward = float((row * repeat) % 3 == 0) if status in ("completed", "truncated") else None
                value = {"row_key": f"{row:016x}", "repeat": repeat, "task": row, "line": row}
                stored = "completed" if status == "unscored" else status
                where = {"environment": environment, "status": stored, "reward": reward}
                file.write(orjson.dumps({**value, **LINE, **where}) + b"\n")
    return path


def numbers(lines: Sequence[str]) -> list[str]:
    return [word for line in lines for word in re.findall(r"(?<!\S)±?\d+(?:\.\d+)?(?!\S)", line)]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_number_breaks(width: int, tmp_path: Path) -> None:
    """Whatever the width: a line per environment, each within the terminal, each number whole and as in a pipe."""
    names = ("calendar", "example_session_state_mgmt", LONG)
    statuses = ("completed", "truncated", "masked", "unscored", "completed")
    run = write_run(tmp_path / "run", names, statuses)
    lines = terminal(width, "aggregate", str(run))
    header, rule, *rows = [line for line in lines if line.strip()]
    rows = rows[: len(names) + 1]  # below them stands what the score is made of
    assert max(map(len, (header, rule, *rows))) <= width
    assert header.split()[:2] == ["environment"[: len(header.split()[0])], "rollouts"]
    assert set(rule.strip()) == {"─"}
    assert len(rows) == len(names) + 1
    piped = subprocess.run(
        [sys.executable, "-m", "gymgate", "aggregate", str(run), "--wide"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()
    assert {*numbers(rows)} <= {*numbers(piped)}
    assert [row.split()[1] for row in rows] == ["128", "128", "128", "384"]
    assert "mean ± se" in header
    assert "failed" not in header  # none did
    assert header.rstrip().endswith("policy")
    if width >= 100:
        assert header.count("pass@") == 2
    if width == 200:
        assert any(LONG in row for row in rows)


@pytest.mark.parametrize(("redirected", "told"), [("", " ?0."), (">&-", "")])
def test_any_stdout_will_do(redirected: str, told: str, tmp_path: Path) -> None:
    """Also one that has no `±`, or is closed."""
    run = write_run(tmp_path / "run", ("mcqa",), ("completed",))
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, "-m", "gymgate", "aggregate", str(run)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told in done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith("next: ")


def test_the_wide_table_goes_on_below(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("mcqa", "calendar"), ("completed",))
    lines = terminal(80, "aggregate", str(run), "--wide")
    assert max(map(len, lines)) <= 80
    headers = [line.split() for line in lines if line.startswith("environment")]
    assert len(headers) > 1
    titles = [title for header in headers for title in header[1:]]
    for title in ("failed", "truncated", "pass@1", "±runs", "pass@2", "pass@16", "policy"):
        assert titles.count(title) == 1
    assert sum(line.startswith("mcqa ") for line in lines) == len(headers)


def test_a_comparison_goes_on_below_too(tmp_path: Path) -> None:
    """What a narrow terminal leaves out, `--wide` shows."""
    both = write_run(tmp_path / "a", ("mcqa", "calendar"), ("completed", "failed"))
    one = write_run(tmp_path / "b", ("mcqa",), ("completed", "masked"))
    narrow = terminal(60, "compare", str(both), str(one))
    titles = ("no reward", "rows only A")
    assert not any(title in line for line in narrow for title in titles)
    wide = terminal(60, "compare", str(both), str(one), "--wide")
    for title in titles:
        assert sum(title in line for line in wide if line.startswith("environment")) == 1


def test_a_line_ending_in_a_cell_makes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A stored run of somebody else could write lines of the table otherwise."""
    print_table(["environment", "pass@1"], [["one\ntwo  1.000", "0.5\n"]])
    assert len(capsys.readouterr().out.splitlines()) == 2
