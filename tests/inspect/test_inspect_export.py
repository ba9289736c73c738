"""A collected run as a log of Inspect's, read back with Inspect's own functions."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
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
from support.scripted import ScriptedPolicy

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
    arguments = {"env": "example_single_tool_call", "gym": "0.7.0", "data": f"{run.parent}/rows.jsonl"}
    assert log.eval.task_args_passed == arguments
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
    export(run, Path(log))
    words = ("score", log, "--scorer", "gymgate/reward", "--action", "overwrite", "--output-file", scored)
    done = inspect(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    again = read_eval_log(scored)
    assert again.results is not None
    assert again.results.scores[0].metrics["mean"].value == 0.75


class Recorded(ScriptedPolicy):
    """Keeps the requests that came in."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, Any]] = []

    async def chat(self, body: dict[str, Any]) -> web.Response:
        self.requests.append(body)
        return await super().chat(body)

    async def responses(self, body: dict[str, Any]) -> web.Response:
        self.requests.append(body)
        return await super().responses(body)


async def retry(directory: Path) -> tuple[Recorded, int | None, str]:
    """Retry a log with a scripted model; return the model, the exit code and the output."""
    policy = Recorded()
    async with policy.serving():
        process = await asyncio.create_subprocess_exec(
            *(INSPECT, "eval-retry", str(directory / "run.eval"), "--log-dir", str(directory / "logs")),
            *("--display", "plain", "--no-fail-on-error"),
            env={**os.environ, "LOCAL_API_KEY": "unused", "LOCAL_BASE_URL": policy.base_url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        return policy, process.returncode, out.decode()


def set_temperature(run: Path, temperature: float) -> None:
    """Set it in each row of the run, whose key then differs."""
    rows = run.parent / "rows.jsonl"
    files = [run / "rollouts.jsonl", run / "failures.jsonl"]
    lines = []
    for line in map(json.loads, rows.read_text().splitlines()):
        before = make_row(line, "rows", 1).key
        line["responses_create_params"]["temperature"] = temperature
        after = make_row(line, "rows", 1).key
        for file in files:
            file.write_text(file.read_text().replace(before, after))
        lines.append(json.dumps(line) + "\n")
    rows.write_text("".join(lines))


@pytest.mark.gym
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_what_failed_in_an_exported_run_is_tried_again(run: Path, tmp_path: Path, dialect: str) -> None:
    """By its endpoint's model, as the row says; its address and key are in no run, so Inspect's variables give them."""
    set_temperature(run, 0.25)
    description = run / "run.json"
    described = json.loads(description.read_text())
    sampling = {"top_p": 0.5, "max_tokens": 77, "top_k": 3}
    described["settings"]["policy"] = {
        "type": "http",
        "model": "scripted",
        "dialect": dialect,
        "sampling": sampling,
    }
    described["settings"]["limits"] = {"timeout_s": 3600.0, "max_calls": 3, "context_overflow": "refuse"}
    rows = run.parent / "rows.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(line for line in lines if "nobody" not in line))
    never = json.loads(lines[0])  # the file has a row that the run left out
    never["responses_create_params"]["input"] = "never asked"
    rows.write_text(f"{json.dumps(never)}\n{rows.read_text()}")
    description.write_text(json.dumps(described))
    first, *others = (run / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (run / "rollouts.jsonl").write_text("".join(others))
    failure = json.loads((run / "failures.jsonl").read_text().splitlines()[-1])
    failed = {
        name: json.loads(first)[name] for name in ("row_key", "occurrence", "repeat", "seed", "task", "line")
    }
    (run / "failures.jsonl").write_text(json.dumps({**failure, **failed}) + "\n")
    export(run, tmp_path / "run.eval")
    log = read_eval_log(str(tmp_path / "run.eval"))
    assert log.eval.model == "openai-api/local/scripted"
    policy, code, out = asyncio.run(retry(tmp_path))
    assert code == 0, out
    assert "1 of 4 samples ran now: 1 rollout: " in out.splitlines()[-1]
    [retried] = (tmp_path / "logs").glob("*.eval")
    again = read_eval_log(str(retried))
    assert {sample.id for sample in samples_of(again)} == {sample.id for sample in samples_of(log)}
    kept = [sample for sample in samples_of(log) if sample.error is None]
    assert len(kept) == 3
    assert [*policy.calls] == [dialect]
    fields = ("model", "temperature", "top_p", "top_k")
    top_k = 3 if dialect == "chat" else None  # Inspect sends the Responses API no further fields
    assert {tuple(map(body.get, fields)) for body in policy.requests} == {("scripted", 0.25, 0.5, top_k)}
    assert {body.get("max_tokens", body.get("max_output_tokens")) for body in policy.requests} == {77}
    arguments = log.eval.task_args_passed
    assert (arguments["max_calls"], arguments["context_overflow"]) == (3, "refuse")
    assert "timeout_s" not in arguments
    by_id = {sample.id: sample for sample in samples_of(again)}
    assert [by_id[sample.id].uuid for sample in kept] == [sample.uuid for sample in kept]


def test_a_run_of_a_served_stack_and_results_without_a_conversation_are_a_log(
    run: Path, tmp_path: Path
) -> None:
    """Such a stack gives a hash of its overrides; an agent may answer anything."""
    described = orjson.loads((run / "run.json").read_bytes())
    described["settings"]["environments"][0]["overrides"] = "sha256:0123456789abcdef"
    (run / "run.json").write_bytes(orjson.dumps(described))
    first, *others = map(orjson.loads, (run / "rollouts.jsonl").read_bytes().splitlines())
    first["result"] = {"responses_create_params": {"input": 5}, "response": "x"}
    (run / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in (first, *others)))
    export(run, tmp_path / "run.eval")
    log = read_eval_log(str(tmp_path / "run.eval"))
    assert "overrides" not in log.eval.task_args_passed
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
