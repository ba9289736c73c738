"""`gymgate compare`: pairs, errors and tests checked against independent computations on made data."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from test_runs_statistics import collected

from gymgate.cli import cli
from gymgate.cli.aggregate import command as aggregate
from gymgate.cli.compare import command
from gymgate.core.errors import ConfigError, DataError
from gymgate.results.compare import Comparison, compare, verdict, why_worse
from gymgate.runs.counted.aggregate import read_runs

Rewards = Sequence[Sequence[float | None]]


def make_run(
    path: Path,
    rewards: Rewards,
    *,
    environment: str = "e",
    failed: int = 0,
    limits: dict[str, Any] | None = None,
    kind: str = "http",
    sources: Sequence[str] = (),
) -> Path:
    """A run with a row for each list of rewards; the last `failed` rollouts failed permanently."""
    path.mkdir()
    described = {"policy": {"type": kind, "model": path.name}, **({"limits": limits} if limits else {})}
    settings = {"format": 1, "settings": {**described, "sources": [*sources]}, "extent": {}}
    (path / "run.json").write_bytes(orjson.dumps(settings))
    lines: list[dict[str, Any]] = []
    for row, group in enumerate(rewards):
        for repeat, reward in enumerate(group):
            value: dict[str, Any] = {
                "row_key": f"{row:016x}",
                "occurrence": 0,
                "repeat": repeat,
                "seed": None,
            }
            value |= {"task": row, "line": row + 1, "environment": environment, "agent": "a"}
            result = {"responses_create_params": {"input": f"question {row}"}, "reward": reward}
            value |= {"status": "completed", "reward": reward, "calls": [], "result": result}
            lines.append(value)
    error = {"kind": "policy", "type": "PolicyError", "message": "gone", "retryable": False}
    finished, lost = lines[: len(lines) - failed], lines[len(lines) - failed :]
    failures = [{**line, "result": None, "reward": None, "final": True, "error": error} for line in lost]
    (path / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in finished))
    (path / "failures.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in failures))
    return path


def compared(first: Path, second: Path) -> Comparison:
    return compare(read_runs([first]).tasks, read_runs([second]).tasks)


def made(seed: int, effect: float, rows: int = 40, repeats: int = 4) -> tuple[Rewards, Rewards]:
    """Rewards of 0 and 1 whose rows differ in difficulty; the second side passes more often by `effect`."""
    dice = random.Random(seed)
    rates = [dice.uniform(0.1, 0.6) for _ in range(rows)]
    sides = [
        [[float(dice.random() < rate + more) for _ in range(repeats)] for rate in rates]
        for more in (0, effect)
    ]
    return sides[0], sides[1]


def test_difference_and_error_are_those_of_an_independent_computation(tmp_path: Path) -> None:
    """With equally many pairs of each row, the clustered error is that of the rows' mean differences."""
    first, second = made(1, 0.3)
    [row] = compared(make_run(tmp_path / "a", first), make_run(tmp_path / "b", second)).rows
    by_row = [statistics.fmean(b) - statistics.fmean(a) for a, b in zip(first, second, strict=True)]
    assert row["difference"] == pytest.approx(statistics.fmean(by_row))
    assert row["difference_se"] == pytest.approx(statistics.stdev(by_row) / math.sqrt(len(by_row)))
    assert (row["pairs"], row["rows"]) == (160, 40)


def test_an_effect_is_found_and_none_is_found_where_there_is_none(tmp_path: Path) -> None:
    """Over 60 made pairs of runs the interval of two standard errors holds the effect about as often as it should."""
    held = 0
    for seed in range(60):
        first, second = made(seed, 0.2, rows=20)
        place = tmp_path / str(seed)
        place.mkdir()
        [row] = compared(make_run(place / "a", first), make_run(place / "b", second)).rows
        held += abs(row["difference"] - 0.2) < 2 * row["difference_se"]
    assert held >= 52


def test_flips_of_one_row_count_once(tmp_path: Path) -> None:
    """As with citation_if in the docs: all six flips are repeats of one row."""
    first = make_run(tmp_path / "a", [[0.0] * 6] * 5)
    second = make_run(tmp_path / "b", [[1.0] * 6, *[[0.0] * 6] * 4])
    [row] = compared(first, second).rows
    assert (row["better"], row["worse"], row["p"]) == (6, 0, 1.0)


@pytest.mark.parametrize("repeats", [1, 3])
def test_p_is_that_of_the_rows_sums(tmp_path: Path, repeats: int) -> None:
    """Two rows rise by one, nine fall by two, one comes out even; repeats that only copy each other leave p as it is."""
    first = [[0.0] * 2 * repeats] * 2 + [[1.0] * 2 * repeats] * 9 + [[0.0, 1.0] * repeats]
    second = [[1.0, 0.0] * repeats] * 2 + [[0.0, 0.0] * repeats] * 9 + [[1.0, 0.0] * repeats]
    [row] = compared(make_run(tmp_path / "a", first), make_run(tmp_path / "b", second)).rows
    totals = [
        sum(sign * size for sign, size in zip(signs, [1] * 2 + [2] * 9, strict=True))
        for signs in itertools.product((1, -1), repeat=11)
    ]
    assert row["p"] == pytest.approx(sum(abs(total) >= 16 for total in totals) / len(totals))


def test_only_pairs_with_two_rewards_count(tmp_path: Path) -> None:
    """A repeat that the first run alone has is no pair."""
    first = make_run(tmp_path / "a", [[1.0, None], [0.0, 0.0], [1.0, 1.0, 0.0]])
    second = make_run(tmp_path / "b", [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], failed=1)
    comparison = compared(first, second)
    [row] = comparison.rows
    assert (row["pairs"], row["left_out"], row["better"], row["worse"]) == (5, 1, 1, 0)
    assert (row["first"], row["second"]) == (pytest.approx(3 / 5), pytest.approx(4 / 5))
    assert (row["failed_first"], row["failed_second"], row["only_first"], row["only_second"]) == (0, 1, 0, 1)
    assert [(flip.task.name, flip.difference) for flip in comparison.flips] == [("e:2", 0.5)]
    assert ([*comparison.only_first], [task.name for task in comparison.only_second]) == ([], ["e:4"])


def test_graded_rewards_have_a_p(tmp_path: Path) -> None:
    [row] = compared(make_run(tmp_path / "a", [[0.5]]), make_run(tmp_path / "b", [[0.75]])).rows
    assert (row["difference"], row["difference_se"], row["p"]) == (0.25, None, 1.0)
    assert row["difference_ci95_low"] is None, "one graded row says nothing of a spread"
    rewards = [[0.5], [0.5], [7.0], [-0.5], [0.0], [0.5]]
    higher = [[reward + 0.25 for reward in group] for group in rewards]
    [row] = compared(make_run(tmp_path / "c", rewards), make_run(tmp_path / "d", higher)).rows
    assert (row["difference"], row["difference_se"], row["p"]) == (0.25, None, 2 / 2**6)
    assert "B is better" in verdict(row, "AB")


def test_runs_without_a_common_row_are_refused(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", [[1.0]])
    second = make_run(tmp_path / "b", [[1.0]], environment="other")
    with pytest.raises(DataError):
        compared(first, second)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    first, second = made(3, 0.3, rows=30)
    make_run(Path("base"), first)
    make_run(Path("tuned"), second, failed=2)
    make_run(Path("whole"), second)
    done = CliRunner().invoke(command, ["base", "whole", "-o", "c.html"])
    assert done.exit_code == 0, done.output
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    assert "whole (B)" in done.stdout.splitlines()[0]
    assert "question" in done.stdout
    assert "whole is better" in done.stdout
    assert "question" in Path("c.html").read_text()
    assert "<0.001, 30 rows)" in done.stdout, "not only the pairs, of which each row has several"
    again = CliRunner().invoke(command, ["base", "tuned", "--json"])
    document = orjson.loads(again.stdout)
    [row] = document["compared"][0]["environments"]
    assert (row["failed_second"], row["left_out"]) == (2, 2)
    assert row["difference"] > 0.1
    assert CliRunner().invoke(command, ["tuned", "base", "--fail-if-worse", "0.1"]).exit_code == 1
    assert CliRunner().invoke(command, ["base", "tuned", "--fail-if-worse", "0"]).exit_code == 0
    refused = CliRunner().invoke(command, ["base", "tuned", "base", "-o", "c.html"])
    assert isinstance(refused.exception, ConfigError)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (("export", "a", "--to", "gym"), "run.json"),
        (("export", "a", "--to", "rows"), "rows.txt"),
        (("aggregate", "a"), "rollouts.jsonl"),
        (("report", "a"), "rollouts.jsonl"),
        (("compare", "a", "a"), "failures.jsonl"),
    ],
    ids=" ".join,
)
def test_no_command_writes_over_a_file_of_a_run(
    write: Sequence[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("a"), [[1.0]])
    before = {path.name: path.read_bytes() for path in Path("a").iterdir()}
    done = CliRunner().invoke(cli, [*write, "-o", f"a/{name}"])
    assert (done.exit_code, f"a/{name}" in done.stderr) == (2, True), done.output
    assert {path.name: path.read_bytes() for path in Path("a").iterdir()} == before


def test_a_replay_is_named_by_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its policy, recorded answers, is nobody who could be better."""
    monkeypatch.chdir(tmp_path)
    first, second = made(3, 0.3, rows=30)
    make_run(Path("asked"), first)
    make_run(Path("rescored"), second, kind="replay")
    assert "rescored is better" in CliRunner().invoke(command, ["asked", "rescored"]).stdout


@pytest.mark.parametrize(
    ("other", "is_said"),
    [
        ({"context_overflow": "answer"}, False),
        ({"context_overflow": "refuse"}, True),
        ({"timeout_s": 9}, True),
    ],
)
def test_runs_that_score_context_overflows_otherwise(tmp_path: Path, other: Any, is_said: bool) -> None:
    """The last one was stored before there was a choice."""
    base = make_run(tmp_path / "a", [[1.0]], limits={"context_overflow": "answer"})
    done = CliRunner().invoke(command, [str(base), str(make_run(tmp_path / "b", [[1.0]], limits=other))])
    assert done.exit_code == 0
    assert ("--context-overflow" in done.stderr) == is_said


def test_runs_of_different_graders_are_named(tmp_path: Path) -> None:
    """Another grader can make a run better or worse, too."""
    runs = [make_run(tmp_path / name, [[1.0]]) for name in "abc"]
    for path, digest in zip(runs, ("one", "two", "one"), strict=True):
        described = orjson.loads((path / "run.json").read_bytes())
        described["settings"]["environments"] = [{"name": "e", "content": {"app.py": digest}}]
        (path / "run.json").write_bytes(orjson.dumps(described))
    first, second, third = map(str, runs)
    assert "environment.content.app.py" in CliRunner().invoke(command, [first, second]).stderr
    assert "environment.content" not in CliRunner().invoke(command, [first, third]).stderr


def test_rows_of_one_run_alone_are_named(tmp_path: Path) -> None:
    few, many = make_run(tmp_path / "a", [[1.0]]), make_run(tmp_path / "b", [[1.0]] * 5)
    lines = CliRunner().invoke(command, [str(few), str(many)]).stdout.splitlines()
    assert "e:2, e:3, e:4 and 1 more" in lines[-1]
    document = orjson.loads(CliRunner().invoke(command, [str(many), str(few), "--json"]).stdout)
    [compared_run] = document["compared"]
    assert compared_run["only_first"] == [f"e/{key:016x}" for key in (1, 2, 3, 4)]
    assert compared_run["only_second"] == []


def in_two_environments(directory: Path) -> Path:
    """The run with the rows from the third on in environment `f`."""
    path = directory / "rollouts.jsonl"
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    moved = [{**line, "environment": "f"} if line["task"] >= 2 else line for line in lines]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in moved))
    return directory


def test_each_environment_has_a_row_and_one_is_over_all(tmp_path: Path) -> None:
    """The first row falls, the last that is in both rises, and one is in the second run alone."""
    same = in_two_environments(make_run(tmp_path / "a", [[1.0], [0.0], [1.0], [0.0]]))
    other = in_two_environments(make_run(tmp_path / "b", [[0.0], [0.0], [1.0], [1.0], [1.0]]))
    comparison = compared(same, other)
    figures = [[row[name] for name in ("pairs", "difference", "only_second")] for row in comparison.rows]
    assert [row["environment"] for row in comparison.rows] == ["e", "f", "all"]
    assert figures == [[2, -0.5, 0], [2, 0.5, 1], [4, 0.0, 1]]
    assert [row["only_first"] for row in compared(other, same).rows] == [0, 1, 1]
    assert [(flip.task.name, flip.difference) for flip in comparison.flips] == [("e:1", -1.0), ("f:4", 1.0)]
    allowed = CliRunner().invoke(command, [str(same), str(other), "--fail-if-worse", "0.1"])
    assert allowed.exit_code == 0, allowed.output


@pytest.mark.parametrize("order", [["worse", "base"], ["base", "worse"]])
def test_one_worse_run_of_several_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("base"), [[1.0], [0.5]])
    make_run(Path("worse"), [[0.0], [0.5]])
    assert CliRunner().invoke(command, ["base", *order, "--fail-if-worse", "0.1"]).exit_code == 1


def test_a_small_p_is_not_printed_as_zero(tmp_path: Path) -> None:
    base, tuned = make_run(tmp_path / "a", [[0.0]] * 16), make_run(tmp_path / "b", [[1.0]] * 16)
    [_, line] = CliRunner().invoke(command, [str(base), str(tuned)]).stdout.splitlines()[1:3]
    assert line.split()[-1] == "<0.001"


def test_rollouts_that_failed_are_not_called_missing_too(tmp_path: Path) -> None:
    """Two failed, and one was not run: the table counts the failed ones, and the note names the other."""
    base = make_run(tmp_path / "a", [[1.0, 1.0]] * 5)
    other = make_run(tmp_path / "b", [[1.0, 1.0]] * 5, failed=2)
    described = orjson.loads((other / "run.json").read_bytes())
    (other / "run.json").write_bytes(orjson.dumps(described | {"extent": {"rollouts": 10}}))
    assert "missing" not in CliRunner().invoke(command, [str(base), str(other)]).output
    assert CliRunner().invoke(aggregate, [str(other)]).exit_code == 0
    assert CliRunner().invoke(aggregate, [str(other), "--complete"]).exit_code == 1
    assert read_runs([other]).tasks.counts.failed == 2
    (other / "run.json").write_bytes(orjson.dumps(described | {"extent": {"rollouts": 11}}))
    done = CliRunner().invoke(command, [str(base), str(other)])
    assert "1 of 11 rollouts are missing" in done.output


def test_equal_rows_of_another_environment_before_it_do_not_hide_a_row(tmp_path: Path) -> None:
    """In a run of e and f, the rows of f that e has too are copies; in a run of f alone they are none."""
    alone = make_run(tmp_path / "a", [[1.0], [0.0]], environment="f")
    both = make_run(tmp_path / "b", [[0.0], [0.0]], environment="e")
    lines = [orjson.loads(line) for line in (alone / "rollouts.jsonl").read_bytes().splitlines()]
    copies = [{**line, "occurrence": 1, "reward": 1.0} for line in lines]
    with (both / "rollouts.jsonl").open("ab") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in copies)
    for runs, difference in (((alone, both), 0.5), ((both, alone), -0.5)):
        result = compared(*runs)
        [row] = [row for row in result.rows if row["environment"] == "f"]
        assert (row["pairs"], row["difference"]) == (2, difference)
        assert (row["only_first"], row["only_second"]) == (0, 0)
        page = tmp_path / "page.html"
        done = CliRunner().invoke(command, [*map(str, runs), "-o", str(page)])
        assert done.exit_code == 0, done.output
        labels = re.findall(r'"label":"([^"]*)"', page.read_text())
        assert sorted(labels) == sorted(run.name for run in runs)  # both sides of the one row that differs


@pytest.mark.parametrize(("reached", "counted"), [("", {"e": 1}), ("e", {"e": 1}), ("f", {"e": 0, "f": 1})])
def test_a_failure_counts_for_its_own_environment(
    tmp_path: Path, reached: str, counted: dict[str, int]
) -> None:
    """An equal row finished in environment e. One that reached no environment gets that of its row."""
    run = make_run(tmp_path / "a", [[1.0, 0.0]], environment="e", failed=1)
    [failure] = (run / "failures.jsonl").read_bytes().splitlines()
    (run / "failures.jsonl").write_bytes(
        orjson.dumps({**orjson.loads(failure), "environment": reached}) + b"\n"
    )
    done = CliRunner().invoke(aggregate, [str(run), "--json"])
    rows = orjson.loads(done.stdout)["environments"][: len(counted)]
    assert {row["environment"]: row["failed"] for row in rows} == counted


def test_equal_rows_are_compared_one_by_one(tmp_path: Path) -> None:
    for name in "ab":
        lines = (make_run(tmp_path / name, [[1.0], [0.0]]) / "rollouts.jsonl").read_bytes().splitlines()
        equal = [{**orjson.loads(line), "row_key": "0" * 16, "occurrence": n} for n, line in enumerate(lines)]
        (tmp_path / name / "rollouts.jsonl").write_bytes(
            b"".join(orjson.dumps(each) + b"\n" for each in equal)
        )
    [row] = compared(tmp_path / "a", tmp_path / "b").rows
    assert (row["rows"], row["pairs"]) == (2, 2)


def test_five_rows_cannot_tell_and_six_can(tmp_path: Path) -> None:
    """Whatever they are: every row of B passes, and none of A."""
    for count, said in ((1, "one row cannot tell"), (5, "cannot tell"), (6, "B is better")):
        runs = [make_run(tmp_path / f"{count}{name}", [[float(name == "b")] * 4] * count) for name in "ab"]
        [row] = compared(*runs).rows
        assert said in verdict(row, "AB")
        assert ("fewer than 6 rows" in verdict(row, "AB")) == (count < 6)
        assert (row["rows_needed"], row["difference_ci95_high"]) == (6 if count < 6 else None, 1.0)
        assert (row["difference_ci95_low"] > 0) == (count > 5)
        back = compared(*reversed(runs)).rows[0]
        assert (back["p"], back["difference"], back["rows_needed"]) == (row["p"], -1.0, row["rows_needed"])
        assert ("A is better" in verdict(back, "AB")) == (count > 5)


def test_rewards_that_differ_by_rounding_are_equal(tmp_path: Path) -> None:
    comparison = compared(make_run(tmp_path / "a", [[0.3]] * 8), make_run(tmp_path / "b", [[0.1 + 0.2]] * 8))
    [row] = comparison.rows
    assert (row["better"], row["worse"], row["p"], comparison.flips) == (0, 0, 1.0, [])


def test_rows_without_a_pair_do_not_decide(tmp_path: Path) -> None:
    """Eight rows are in both, and B failed in three."""
    base = make_run(tmp_path / "a", [[0.0]] * 8)
    [row] = compared(base, make_run(tmp_path / "b", [[1.0]] * 8, failed=3)).rows
    assert (row["rows"], row["rows_paired"], row["rows_needed"]) == (8, 5, 6)
    assert "fewer than 6 rows" in verdict(row, "AB")


def test_equal_runs_and_runs_of_which_all_failed(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, [[1.0], [0.0]]) for name in "ab"]
    [row] = compared(*runs).rows
    assert (row["p"], row["difference"], row["rows_needed"], row["failed_needed"]) == (1.0, 0.0, None, None)
    assert "equal rewards" in verdict(row, "AB")
    [row] = compared(runs[0], make_run(tmp_path / "c", [[1.0], [0.0]], failed=2)).rows
    assert (row["p"], row["difference"], row["difference_ci95_low"], row["rows_needed"]) == (None,) * 4
    assert "no pair" in verdict(row, "AB")


def test_the_interval_ends_where_differences_do(tmp_path: Path) -> None:
    """Two of three rows change; `-0.667 ± t(0.975; 2) 0.333` would begin at -2.1."""
    base, other = make_run(tmp_path / "a", [[1.0]] * 3), make_run(tmp_path / "b", [[0.0], [0.0], [1.0]])
    [row] = compared(base, other).rows
    ends = row["difference_ci95_low"], row["difference_ci95_high"]
    assert ends == (-1.0, pytest.approx(-2 / 3 + 4.302653 / 3))
    [row] = compared(base, make_run(tmp_path / "c", [[-9.0], [0.0], [1.0]])).rows
    assert row["difference_ci95_low"] < -10, "rewards of no known range have no such end"
    beyond = make_run(tmp_path / "d", [[0.0, -9.0], [0.0, 1.0], [1.0, 1.0]])
    [row] = compared(base, beyond).rows
    assert row["difference_ci95_low"] < -2, "nor have they if such a one has no pair"


def test_one_row_of_graded_rewards_has_no_interval(tmp_path: Path) -> None:
    [row] = compared(make_run(tmp_path / "a", [[0.0]]), make_run(tmp_path / "b", [[0.96]])).rows
    assert (row["difference"], row["difference_ci95_low"], row["difference_ci95_high"]) == (0.96, None, None)


def test_failed_rollouts_that_would_undo_a_decision(tmp_path: Path) -> None:
    """A passes ten rows and B none; of four more, which A fails, B has no reward. p is 0.039 with two of them passed and
    0.092 with three (exact binomial)."""
    base = make_run(tmp_path / "a", [[1.0]] * 10 + [[0.0]] * 4)
    other = make_run(tmp_path / "b", [[0.0]] * 10 + [[1.0]] * 4, failed=4)
    [row] = compared(base, other).rows
    assert (row["failed_needed"], row["failed_second"]) == (3, 4)
    assert verdict(row, "AB").endswith("holds unless 3 of the 4 failed of B had passed")
    [row] = compared(other, base).rows
    assert verdict(row, "BA").endswith("holds unless 3 of the 4 failed of A had passed")
    [row] = compared(base, make_run(tmp_path / "c", [[0.0]] * 14, failed=2)).rows
    assert (row["failed_needed"], row["failed_second"]) == (None, 2)
    assert "unless" not in verdict(row, "AB")


def test_failed_rollouts_of_the_winner_and_of_both(tmp_path: Path) -> None:
    """A passes six rows and B the other four, which A did not finish."""
    base = make_run(tmp_path / "a", [[1.0]] * 6 + [[0.0]] * 4, failed=4)
    other = make_run(tmp_path / "b", [[0.0]] * 6 + [[1.0]] * 4)
    [row] = compared(base, other).rows
    assert row["failed_needed"] == 1, "six to one: p is 0.125"
    assert verdict(row, "AB").endswith("holds unless 1 of the 4 failed of A had got 0")
    both = make_run(tmp_path / "c", [[0.0]] * 6 + [[1.0]] * 4, failed=4)
    [row] = compared(base, both).rows
    assert row["failed_needed"] == 2, "one row takes a failure of each"
    assert "2 of the 8 failed had passed in B or got 0 in A" in verdict(row, "AB")


def test_rollouts_without_a_reward_that_did_not_fail_undo_nothing(tmp_path: Path) -> None:
    """A repeat of each row was not scored in one run; had it failed, two of them would."""
    whole = make_run(tmp_path / "a", [[1.0, 0.0]] * 6), make_run(tmp_path / "b", [[0.0, 1.0]] * 6)
    partly = make_run(tmp_path / "c", [[1.0, None]] * 6), make_run(tmp_path / "d", [[0.0, None]] * 6)
    for first, second in (
        (whole[0], partly[1]),
        (partly[0], whole[1]),
        (whole[1], partly[0]),
        (partly[1], whole[0]),
    ):
        [row] = compared(first, second).rows
        assert (row["p"], row["left_out"], row["failed_needed"]) == (2 / 2**6, 6, None)


def test_no_smaller_number_of_failed_rollouts_undoes_a_decision() -> None:
    """Made runs of 6 to 8 rows and two repeats, of which up to four rollouts of either run failed, by trying every choice: as
    many as are named always suffice, and hardly ever do fewer."""
    dice = random.Random(1)
    decided, more, numbers = 0, 0, set()
    while decided < 150:
        rows = dice.randint(6, 8)
        rates = (0.95, dice.choice((0.05, 0.2)))
        made = [[[float(dice.random() < rate) for _ in "ab"] for _ in range(rows)] for rate in rates]
        lost = [dice.randint(0, 4) for _ in "ab"]
        [row] = compare(*(collected(side, failed=count) for side, count in zip(made, lost, strict=True))).rows
        if row["p"] > 0.05 or row["difference"] > 0:
            continue
        ends = [(side, end) for side, count in enumerate(lost) for end in range(2 * rows - count, 2 * rows)]
        undoing = [chosen for chosen in choices(ends) if is_undone(made, ends, chosen)]
        fewest = min(map(len, undoing), default=None)
        assert (row["failed_needed"] is None) == (fewest is None)
        decided, more = decided + 1, more + (row["failed_needed"] != fewest)
        assert fewest is None or row["failed_needed"] >= fewest
        numbers.add(fewest)
    assert more <= 2
    assert numbers >= {None, 1, 2, 3, 4}


def choices(places: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    return [chosen for size in range(1, len(places) + 1) for chosen in itertools.combinations(places, size)]


def is_undone(
    made: Sequence[Rewards], lost: Sequence[tuple[int, int]], chosen: Sequence[tuple[int, int]]
) -> bool:
    """Whether A is not better if of the failed rollouts the chosen ones of B had got 1, and those of A 0."""
    flat: list[list[Any]] = [[reward for group in side for reward in group] for side in made]
    for side, place in lost:
        flat[side][place] = float(side) if (side, place) in chosen else None
    pairs = [0 if None in pair else pair[0] - pair[1] for pair in zip(*flat, strict=True)]
    sums = [int(one + other) for one, other in zip(pairs[::2], pairs[1::2], strict=True)]
    totals = [
        sum(sign * size for sign, size in zip(signs, sums, strict=True))
        for signs in itertools.product((1, -1), repeat=len(sums))
    ]
    return sum(sums) <= 0 or sum(abs(total) >= sum(sums) for total in totals) > 0.05 * len(totals)


def test_a_run_that_is_worse_by_just_the_limit_is_not_worse() -> None:
    """And an environment that one run alone has judges nothing."""
    alone = {"environment": "alone", "rows": 0, "pairs": 0, "difference": None}
    row = {"environment": "e", "rows": 1, "pairs": 1, "difference": -(0.1 + 0.2)}
    assert why_worse([alone, row], 0.3) is None
    assert why_worse([alone, row], 0.29) is not None
    assert why_worse([{**alone, "rows": 1}, row], 0.3) is not None


def test_examples_are_called_that_wherever_they_are_compared_or_counted(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path / name, [[0.0, 1.0]] * 3, sources=["example"])) for name in "ab"]
    said, page = "3 example rows, not the benchmark", tmp_path / "c.html"
    assert said in CliRunner().invoke(command, [*runs, "-o", str(page)]).stdout
    assert said in page.read_text()
    [compared_run] = orjson.loads(CliRunner().invoke(command, [*runs, "--json"]).stdout)["compared"]
    assert (compared_run["notes"], compared_run["verdict"]) == ([said], "e: equal rewards in all 6 pairs")
    assert said in orjson.loads(CliRunner().invoke(aggregate, [runs[0], "--json"]).stdout)["notes"]
    own = str(make_run(tmp_path / "own", [[0.0, 1.0]] * 3, sources=["/rows.jsonl"]))
    (tmp_path / "whole").mkdir()
    whole = make_run(tmp_path / "whole" / "a", [[0.0, 1.0]] * 3, sources=["/rows.jsonl"])  # of the same model
    assert not read_runs([Path(runs[0]), whole], first_of_overlap=True).is_example
    assert said not in CliRunner().invoke(command, [runs[0], own, "-o", str(page)]).stdout
    assert said not in page.read_text()
