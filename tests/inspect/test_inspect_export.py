"""A collected run as a log of Inspect's, read back with Inspect's own functions."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries
from inspect_ai.model import ChatMessageAssistant

from gymgate.cli.export import command
from gymgate.core.errors import ConfigError
from gymgate.integrations.inspect.eval_log import _usage
from gymgate.integrations.inspect.scorer import score_of as score_of_record
from gymgate.integrations.inspect.scorer import target_of
from gymgate.rollouts.row import make_row
from support.inspected import INSPECT, samples_of, score_of

EARLIER = Path(__file__).parents[1] / "unit" / "earlier_run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of five rows: three solved, one wrong, one that no agent could take."""
    shutil.copytree(EARLIER, tmp_path / "earlier")
    description = tmp_path / "earlier" / "run" / "run.json"
    description.write_text(description.read_text().replace("@DIRECTORY@", str(tmp_path / "earlier")))
    return tmp_path / "earlier" / "run"


def export(run: Path, output: Path) -> str:
    done = CliRunner().invoke(
        command, [str(run), "--to", "inspect", "-o", str(output)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_more_cached_than_read_tokens_are_no_negative_number() -> None:
    tokens = {"calls": 1, "input_tokens": 5, "cached_tokens": 9, "output_tokens": 2, "reasoning_tokens": None}
    (usage,) = _usage("m", tokens).values()
    assert (usage.input_tokens, usage.input_tokens_cache_read) == (0, 9)


def test_a_run_is_a_log_with_conversations_scores_and_errors(run: Path, tmp_path: Path) -> None:
    assert "5 rollouts" in export(run, tmp_path / "run.eval")
    log = read_eval_log(str(tmp_path / "run.eval"))
    assert log.status == "success"
    assert log.results is not None
    (result,) = log.results.scores
    assert (result.name, result.scored_samples) == ("reward", 4)
    assert result.metrics["mean"].value == 0.75
    assert log.eval.model == "none/replay"
    assert log.eval.metadata is not None
    assert log.eval.metadata["account"] == "5 rollouts: 3 right, 1 wrong; 1 failed (1 by data)"
    assert log.eval.metadata["nemo_gym"] == "0.7.0"
    samples = {sample.metadata["nemo_gym"]["line"]: sample for sample in samples_of(log)}
    assert [score_of(samples[line]).value for line in (1, 2, 3, 5)] == [1.0, 1.0, 1.0, 0.0]
    assert samples[4].error is not None
    assert "agent 'nobody'" in samples[4].error.message
    assert not samples[4].scores
    first = samples[1]
    assert [message.role for message in first.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    called = first.messages[2]
    assert isinstance(called, ChatMessageAssistant)
    assert called.tool_calls is not None
    assert called.tool_calls[0].arguments == {"city": "San Francisco"}
    assert first.messages[:2] == first.input or len(first.input) == 2
    assert first.output.completion.startswith("Right now, it's cold")
    assert len(read_eval_log_sample_summaries(str(tmp_path / "run.eval"))) == 5


def test_repeats_are_epochs_and_what_counts_for_nothing_is_no_number(run: Path, tmp_path: Path) -> None:
    rollouts = run / "rollouts.jsonl"
    line = rollouts.read_text().splitlines()[0]
    masked = line.replace('"repeat":0', '"repeat":1', 1).replace(
        '"status":"completed"', '"status":"masked"', 1
    )
    rollouts.write_text(rollouts.read_text() + masked + "\n")
    export(run, tmp_path / "run.eval")
    log = read_eval_log(str(tmp_path / "run.eval"))
    assert log.eval.config.epochs == 2
    (again,) = [sample for sample in samples_of(log) if sample.epoch == 2]
    assert math.isnan(score_of(again).value)
    assert score_of(again).reason == "masked"
    assert log.results is not None
    assert log.results.scores[0].metrics["mean"].value == 0.75


def test_a_run_twice_is_no_second_epoch(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "again")
    arguments = [str(run), str(tmp_path / "again"), "--to", "inspect", "-o", str(tmp_path / "run.eval")]
    done = CliRunner().invoke(command, arguments)
    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "run.eval").exists()
    assert CliRunner().invoke(command, [*arguments, "--overlap", "first"]).exit_code == 0
    log = read_eval_log(str(tmp_path / "run.eval"))
    assert (log.eval.config.epochs, len(samples_of(log))) == (1, 5)


def test_two_models_are_not_one_log(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    described = tmp_path / "other" / "run.json"
    described.write_text(described.read_text().replace('"type": "replay"', '"type": "http"'))
    rollouts = tmp_path / "other" / "rollouts.jsonl"
    rollouts.write_text(rollouts.read_text().replace('"repeat":0', '"repeat":1'))
    arguments = [str(run), str(tmp_path / "other"), "--to", "inspect", "-o", str(tmp_path / "run.eval")]
    done = CliRunner().invoke(command, arguments)
    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "run.eval").exists()


def test_another_ending_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.eval, \.json"):
        export(run, tmp_path / "run.jsonl")


def test_a_sum_of_tokens_is_of_all_calls_or_none(run: Path, tmp_path: Path) -> None:
    """One call whose endpoint counted nothing would make it too low; a refused one used nothing."""
    rollouts = run / "rollouts.jsonl"
    usage = {"input_tokens": 100, "output_tokens": 10}
    made = {"index": 0, "dialect": "chat", "status_code": 200, "usage": usage}
    refused = {**made, "index": 1, "status_code": 429, "usage": {}}
    unknown = {**made, "index": 1, "usage": {}}
    lines = [orjson.loads(line) for line in rollouts.read_bytes().splitlines()]
    for line, calls in zip(lines, ([made, refused], [made, unknown], [made], [made]), strict=True):
        line["calls"] = calls
    rollouts.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    export(run, tmp_path / "run.eval")
    log = read_eval_log(str(tmp_path / "run.eval"))
    totals = [[usage.total_tokens for usage in sample.model_usage.values()] for sample in samples_of(log)]
    assert sorted(total for total in totals) == [[], [], [110], [110], [110]]
    assert log.stats.model_usage == {}


def test_the_total_has_failed_attempts_and_a_part_of_a_run_is_no_success(run: Path, tmp_path: Path) -> None:
    """The first rollout finished in its second attempt; the last one is missing."""
    rollouts, failures = run / "rollouts.jsonl", run / "failures.jsonl"
    lines = [orjson.loads(line) for line in rollouts.read_bytes().splitlines()]
    call = {"index": 0, "dialect": "chat", "status_code": 200}
    for line in lines:
        line["calls"] = [{**call, "usage": {"input_tokens": 100, "output_tokens": 10}}]
    rollouts.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines[:-1]))
    identity = {name: lines[0][name] for name in ("row_key", "occurrence", "repeat", "seed", "environment")}
    usage = {"policy_model": {"calls": 2, "input_tokens": 1000, "output_tokens": 5}}
    error = {"kind": "policy", "type": "PolicyError", "message": "gone", "retryable": True}
    failed = {**identity, "status": "failed", "final": False, "error": error, "usage": usage}
    [reached_none] = map(orjson.loads, failures.read_bytes().splitlines())
    failures.write_bytes(
        b"".join(orjson.dumps(line) + b"\n" for line in (failed, {**reached_none, "usage": {}}))
    )
    export(run, tmp_path / "run.eval")
    log = read_eval_log(str(tmp_path / "run.eval"))
    assert log.status == "cancelled"
    [total] = log.stats.model_usage.values()
    assert total.total_tokens == 3 * 110 + 1005
    assert [sample.model_usage["none/replay"].total_tokens for sample in samples_of(log)[:1]] == [110]


def inspect(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [INSPECT, *words, "--display", "plain"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("ending", ["eval", "json"])
def test_an_exported_log_can_be_scored_again(run: Path, tmp_path: Path, ending: str) -> None:
    log, scored = str(tmp_path / f"run.{ending}"), str(tmp_path / f"scored.{ending}")
    if ending == "json":
        described = orjson.loads((run / "run.json").read_bytes())
        described["settings"]["policy"] = {"type": "http", "model": "org/m"}
        (run / "run.json").write_bytes(orjson.dumps(described))
    export(run, Path(log))
    assert read_eval_log(log).eval.model == {"eval": "none/replay", "json": "none/org/m"}[ending]
    words = ("score", log, "--scorer", "gymgate/reward", "--action", "overwrite", "--output-file", scored)
    done = inspect(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    again = read_eval_log(scored)
    assert again.results is not None
    assert again.results.scores[0].metrics["mean"].value == 0.75


def test_a_retry_of_a_run_is_refused_and_asks_nobody(run: Path, tmp_path: Path) -> None:
    """The log does not say with which limits, sampling and rows it was run; `gymgate run --rerun-failed` knows."""
    export(run, tmp_path / "run.eval")
    command = [INSPECT, "eval-retry", str(tmp_path / "run.eval"), "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "Task 'example_single_tool_call' not found" in done.stdout + done.stderr
    assert not [*tmp_path.glob("logs/*.eval")]


def test_results_without_a_conversation_are_a_log(run: Path, tmp_path: Path) -> None:
    """An agent may answer anything."""
    first, *others = map(orjson.loads, (run / "rollouts.jsonl").read_bytes().splitlines())
    first["result"] = {"responses_create_params": {"input": 5}, "response": "x"}
    (run / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in (first, *others)))
    export(run, tmp_path / "run.eval")
    log = read_eval_log(str(tmp_path / "run.eval"))
    assert len(samples_of(log)) == 5


def test_the_answer_of_a_score_is_the_extracted_one_where_the_result_has_it() -> None:
    record = {"status": "completed", "reward": 0.0, "result": {"extracted_answer": "B"}}
    assert score_of_record(record, "So it is \\boxed{B}").answer == "B"
    assert score_of_record({**record, "result": {}}, "So it is B").answer == "So it is B"
    nothing = score_of_record({**record, "result": {}, "answer_found": False}, "So it is B")
    assert nothing.answer == "none"
    assert nothing.explanation == "completed: no answer found"
    for reward, explanation in ((0.0, "completed: wrong"), (0.5, "completed"), (1.0, "completed: right")):
        assert score_of_record({**record, "reward": reward}, "B").explanation == explanation


def test_where_calls_are_graded_they_are_the_answer() -> None:
    def call(city: str) -> dict[str, str]:
        return {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}

    said = [
        {"type": "function_call", "call_id": "1", **call("Oslo")},
        {"type": "message", "content": "Done."},
    ]
    record: dict[str, Any] = {"status": "completed", "reward": 0.0, "result": {"response": {"output": said}}}
    answer = score_of_record(record, "Done.", {"ground_truth": [call("Rome")]}).answer
    assert answer is not None
    assert orjson.loads(answer) == {"name": "get_weather", "arguments": {"city": "Oslo"}}
    assert orjson.loads(target_of({"ground_truth": [call("Oslo")]})) == orjson.loads(answer), "in one form"
    assert (
        score_of_record({**record, "result": {}}, "Done.", {"ground_truth": [call("Rome")]}).answer == "Done."
    )
    repeated = {**record["result"], "ground_truth": [call("Rome")]}
    assert score_of_record({**record, "result": repeated}, "Done.").answer == answer
    assert score_of_record(record, "Done.", {"expected_answer": "Rome"}).answer == "Done."
    assert score_of_record(record, "Done.").answer == "Done."


def test_the_target_is_read_again_from_the_row_where_the_result_does_not_repeat_it(
    run: Path, tmp_path: Path
) -> None:
    rows = run.parent / "rows.jsonl"
    first, *others = map(orjson.loads, rows.read_bytes().splitlines())
    before, first["expected_answer"] = make_row(first, "rows.jsonl", 1).key, "cold"
    rows.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in (first, *others)))
    after = make_row(first, "rows.jsonl", 1).key
    for path in run.iterdir():
        path.write_text(path.read_text().replace(before, after))
    rollouts = run / "rollouts.jsonl"
    rollouts.write_text(rollouts.read_text().replace('"rows.jsonl"', f'"{rows}"'))
    export(run, tmp_path / "run.eval")
    samples = samples_of(read_eval_log(str(tmp_path / "run.eval")))
    assert Counter(sample.target for sample in samples) == {"cold": 1, "": 4}
    rows.unlink()
    export(run, tmp_path / "without.eval")
    assert {sample.target for sample in samples_of(read_eval_log(str(tmp_path / "without.eval")))} == {""}
