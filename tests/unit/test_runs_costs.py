"""Tokens of runs and what they cost: nothing that is unknown counts as 0, and failed attempts were paid too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_results_report import tables_of
from test_runs_aggregate import line, write_run

from gymgate.cli import cli
from gymgate.core.errors import OptionError
from gymgate.rollouts import ModelCall, Rollout, RolloutError, Usage
from gymgate.rollouts.row import make_row
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.collected.progress_display import state
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.costs import TokenUsage, dollars
from gymgate.runs.described.plan import Identity, PlannedRollout
from gymgate.runs.described.prices import Price
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.record import collected, failure_line, to_line
from gymgate.runs.stored.score import score_of
from support.collecting import as_collected
from support.json_output import read_output

PRICES = {"policy_model": Price(1.0, 4.0), "judge": Price(10.0, 10.0)}
"""Of 1,000,000 input and output tokens."""


def call(
    read: int | None = 100,
    written: int | None = 10,
    server: str = "policy_model",
    status: int = 200,
    **more: int,
) -> dict[str, Any]:
    return {
        "model_server": server,
        "status_code": status,
        "usage": {"input_tokens": read, "output_tokens": written, **more},
    }


def usages(path: Path, prices: dict[str, Price] = PRICES) -> dict[tuple[str, str], TokenUsage]:
    return {(row.environment, row.model_server): row for row in read_runs([path]).tasks.usage.rows(prices)}


def test_costs_by_environment_and_in_all_with_judges_apart(tmp_path: Path) -> None:
    lines = [line(0, repeat, 1.0, calls=[call(), call(300, cached_tokens=200)]) for repeat in range(3)]
    lines += [line(1, 0, 0.0, environment="judged", calls=[call(1000, 1000), call(50, 50, server="judge")])]
    found = usages(write_run(tmp_path / "run", lines))
    assert [*found] == [
        ("judged", "policy_model"), ("judged", "judge"), ("mcqa", "policy_model"), ("all", "policy_model"), ("all", "judge"),
    ]  # fmt: skip
    mcqa, both = found["mcqa", "policy_model"], found["all", "policy_model"]
    assert (mcqa.rollouts, mcqa.counted, mcqa.calls) == (3, 3, 6)
    assert (mcqa.input_tokens, mcqa.cached_tokens, mcqa.output_tokens) == (1200, 600, 60)
    assert (mcqa.cached_share, found["all", "judge"].cached_share) == (0.5, None)
    assert mcqa.cost == pytest.approx(1200e-6 + 4 * 60e-6), "cached input has the full price"
    assert both.cost == pytest.approx(2200e-6 + 4 * 1060e-6)
    assert found["judged", "judge"].cost == found["all", "judge"].cost == pytest.approx(1000e-6)
    assert found["all", "judge"].rollouts == 1


@pytest.mark.parametrize("read", [100, None])
def test_a_rollout_without_the_usage_of_a_call_is_unknown(read: int | None, tmp_path: Path) -> None:
    lines = [line(0, 0, 1.0, calls=[call()]), line(0, 1, 1.0, calls=[call(), call(read, None)])]
    [usage] = usages(write_run(tmp_path / "run", lines)).values()
    assert (usage.counted, usage.rollouts) == (1, 2)
    assert (usage.calls, usage.input_tokens, usage.output_tokens) == (1, 100, 10)


def test_a_rollout_that_called_no_model_used_no_tokens(tmp_path: Path) -> None:
    lines = [line(0, 0, 1.0, calls=[call()]), line(0, 1, 0.0, calls=[])]
    [usage] = usages(write_run(tmp_path / "run", lines)).values()
    assert (usage.rollouts, usage.counted, usage.input_tokens) == (2, 2, 100)


def test_an_environment_called_all_is_not_the_sum_of_all(tmp_path: Path) -> None:
    alone = write_run(tmp_path / "alone", [line(0, 0, 1.0, environment="all", calls=[call()])])
    (row,) = read_runs([alone]).tasks.usage.rows(PRICES)
    assert (row.rollouts, row.input_tokens) == (1, 100)
    lines = [line(n, 0, 1.0, environment=name, calls=[call()]) for n, name in enumerate(("all", "mcqa"))]
    rows = read_runs([write_run(tmp_path / "two", lines)]).tasks.usage.rows(PRICES)
    assert [(row.environment, row.input_tokens) for row in rows] == [
        ("all", 100),
        ("mcqa", 100),
        ("all", 200),
    ]


def test_nothing_known_has_no_cost(tmp_path: Path) -> None:
    [usage] = usages(write_run(tmp_path / "run", [line(0, 0, 1.0, calls=[call(None, None)])])).values()
    assert (usage.counted, usage.rollouts, usage.input_tokens, usage.cost) == (0, 1, None, None)


def test_a_judge_has_a_price_only_if_one_is_given(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(0, 0, 1.0, calls=[call(), call(server="judge")])])
    assert usages(run, {"policy_model": Price(1, 1)})["mcqa", "judge"].cost is None
    assert usages(run, {"*": Price(1, 1)})["mcqa", "judge"].cost == pytest.approx(110e-6)
    assert usages(run, {"*": Price(1, 1)})["mcqa", "policy_model"].cost is None


def test_a_refused_call_costs_nothing_and_a_broken_one_is_unknown() -> None:
    def tokens_of_calls(*calls: Any) -> Any:
        return score_of(Attempt.read({**line(0, 0, 1.0), "calls": calls}, Path("r"), 1)).tokens

    assert tokens_of_calls(call(), call(None, None, status=429))["policy_model"] == {
        "calls": 1, "input_tokens": 100, "cached_tokens": None, "output_tokens": 10, "reasoning_tokens": None,
    }  # fmt: skip
    assert tokens_of_calls(call(), call(None, None, status=502)) == {"policy_model": None}


def failed(calls: int, usage: Usage | None = None) -> Rollout:
    usage = usage or Usage(input_tokens=100, output_tokens=10)
    return Rollout(
        id="r",
        environment="mcqa",
        agent="a",
        status="failed",
        error=RolloutError(kind="timeout", message="m", type="RolloutTimeoutError"),
        calls=[
            ModelCall(index=index, dialect="chat", status_code=200, usage=usage) for index in range(calls)
        ],
    )


def test_failed_attempts_count_from_their_lines_alone(tmp_path: Path) -> None:
    row = make_row({"responses_create_params": {"input": "a"}}, "s", 1)
    planned = PlannedRollout(Identity(row.key, 0, 0, None), row, "mcqa", 0)
    attempts = [failed(2), failed(0), failed(1, Usage())]
    lines = b"".join(failure_line(collected(planned, each, 0), final=False) for each in attempts)
    done = failed(1).model_copy(update={"status": "completed", "error": None, "reward": 1.0})
    run = write_run(tmp_path / "run", [json.loads(to_line(collected(planned, done, 3)))])
    (run / "failures.jsonl").write_bytes(lines)
    [usage] = usages(run).values()
    assert (usage.rollouts, usage.counted, usage.calls, usage.input_tokens) == (4, 3, 3, 300)


def test_a_failed_attempt_of_an_earlier_version_is_unknown(tmp_path: Path) -> None:
    error = {"kind": "timeout", "type": "t", "message": "m"}
    failures = [{**line(0, 1, None), "final": True, "error": error}]
    [usage] = usages(
        write_run(tmp_path / "run", [line(0, 0, 1.0, calls=[call()])], failures=failures)
    ).values()
    assert (usage.counted, usage.rollouts) == (1, 2)


def test_aggregate_prints_a_table_and_json(tmp_path: Path) -> None:
    lines = [line(0, 0, 1.0, calls=[call(1_000_000, 500_000)]), line(0, 1, 1.0, calls=[call(None, None)])]
    run = str(write_run(tmp_path / "run", lines))
    done = CliRunner().invoke(cli, ["aggregate", run, "--price", "0.5,2"])
    assert done.exit_code == 0, done.output
    head, row = done.stdout.split("\n\n")[1].splitlines()
    assert head.split("  ")[0] == "environment"
    assert row.split() == ["mcqa", "policy", "2", "1", "1,000,000", "-", "500,000", "$1.50"]
    assert "1 of 2 rollouts" in done.stderr
    assert "$" not in CliRunner().invoke(cli, ["aggregate", run]).output
    done = CliRunner().invoke(cli, ["aggregate", run, "--price", "0.5,2", "--json"])
    [usage] = read_output("aggregate", done.stdout)["usage"]
    assert (usage["cost"], usage["counted"], usage["rollouts"]) == (1.5, 1, 2)
    done = CliRunner().invoke(cli, ["aggregate", run, "--price", "0.5,2", "--markdown"])
    assert "| mcqa | policy | 2 |" in done.stdout


def test_the_report_has_costs_if_there_is_a_price(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(0, 0, 1.0, calls=[call(2_000_000, 0)])])
    costs = []
    for arguments in ([], ["--price", "3,0"]):
        done = CliRunner().invoke(cli, ["report", str(run), *arguments])
        assert done.exit_code == 0, done.output
        [row] = [row for table in tables_of(run / "report.html") for row in table if "model server" in row]
        costs.append(row.get("cost"))
    assert costs == [None, 6.0]


@pytest.mark.parametrize("price", ["1", "1,2,3", "a,b", "-1,2", "nan,1", "inf,1", "judge=1", ""])
@pytest.mark.parametrize("command", ["aggregate", "report", "run"])
def test_a_price_of_another_form_is_refused(command: str, price: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, [command, str(tmp_path), "--price", price])
    assert isinstance(done.exception, OptionError)
    assert repr(price) in str(done.exception)


@pytest.mark.parametrize("command", ["aggregate", "report"])
def test_replayed_answers_have_no_price(command: str, tmp_path: Path) -> None:
    settings = {"policy": {"type": "replay"}}
    run = write_run(tmp_path / "run", [line(0, 0, 1.0, calls=[call()])], settings=settings)
    done = CliRunner().invoke(cli, [command, str(run), "--price", "1,1"])
    assert done.exit_code == 1
    assert "replayed" in str(done.exception)
    assert CliRunner().invoke(cli, [command, str(run), "--price", "judge=1,1"]).exit_code == 0


def test_the_progress_shows_the_running_cost() -> None:
    progress = RunProgress(total=9, prices={"policy_model": Price(1000, 0)})
    assert "$" not in state(progress)
    progress.count_failure(as_collected(failed(3)), final=False)
    done = failed(2).model_copy(update={"status": "completed", "error": None, "reward": 1.0})
    progress.count(as_collected(done))
    assert "$0.5000" in state(progress), "a failed attempt was paid, too"
    progress.count_failure(as_collected(failed(1, Usage()), 1), final=True)
    assert "1 rollout" in state(progress).partition("$0.5000")[2]
    progress.prices = {"judge": Price(1, 1)}
    assert "$" not in state(progress)


def test_amounts() -> None:
    assert [dollars(amount) for amount in (None, 0.0, 0.00001, 0.0123, 1.0, 12345.678)] == [
        "-", "$0.00", "<$0.0001", "$0.0123", "$1.00", "$12,345.68",
    ]  # fmt: skip


def test_one_environment_has_no_sum(tmp_path: Path) -> None:
    found = usages(write_run(tmp_path, [line(0, 0, 1.0, calls=[call(), call(server="judge")])]))
    assert [*found] == [("mcqa", "policy_model"), ("mcqa", "judge")]
