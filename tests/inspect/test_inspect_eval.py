"""`inspect eval gymgate/nemo_gym` with real Gym servers: tool calls, failed rows, limits, concurrency, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inspect_ai.event import LoggerEvent, ModelEvent
from inspect_ai.model import ChatMessageAssistant, ChatMessageTool

import gymgate
from gymgate.inspect import nemo_gym
from support.inspected import INSPECT, run, samples_of, score_of, start, the_log
from support.ledger import daemon_of
from support.scripted import FINAL, MARK, ScriptedPolicy, until_none_is_left

pytestmark = [pytest.mark.gym, pytest.mark.timeout(180)]

COUNTER = "example_session_state_mgmt"


@pytest.fixture
async def policy() -> AsyncIterator[ScriptedPolicy]:
    async with ScriptedPolicy().serving() as policy:
        yield policy


def rows(path: Path) -> Path:
    """Two good rows, of which the scripted policy solves the first, and one that the environment cannot score."""
    good = [row.data for row in gymgate.open_rows(COUNTER)[:2]]
    broken = {key: value for key, value in good[0].items() if key != "expected_count"}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*good, broken]))
    return path


def test_a_task_has_its_environments_name_and_a_sample_the_right_answer_of_its_row() -> None:
    task = nemo_gym(env="mcqa")
    known = [*gymgate.open_rows("mcqa")]
    assert task.name == "mcqa"
    assert [sample.target for sample in task.dataset] == [row.data["expected_answer"] for row in known]


async def test_rows_are_samples_with_gyms_rewards_and_inspects_model(
    tmp_path: Path, policy: ScriptedPolicy
) -> None:
    """Six rollouts at once: every call is an event with usage in its own sample, and a failed rollout is an error, not a 0."""
    data = rows(tmp_path / "rows.jsonl")
    log = await run(
        policy,
        tmp_path,
        *("-T", f"data={data}", "-T", "agent_processes=6", "--epochs", "2", "--max-samples", "6"),
        *("--no-fail-on-error", "--temperature", "0.25"),
    )
    assert log.status == "success"
    assert log.results is not None
    (result,) = log.results.scores
    assert {name: metric.value for name, metric in result.metrics.items()}["mean"] == 0.5
    assert (result.scored_samples, policy.calls["chat"]) == (2, 6 * 4)
    account = f"{COUNTER}: 6 rollouts: 2 right, 2 wrong; 2 failed (2 by environment)"
    assert (tmp_path / "printed.txt").read_text().splitlines()[-1] == account
    samples = samples_of(log)
    assert [sample.epoch for sample in samples] == [1, 2] * 3
    assert len({sample.id for sample in samples}) == 3
    by_line = {sample.metadata["nemo_gym"]["line"]: sample for sample in samples}
    failed = by_line[3]
    assert failed.error is not None
    assert failed.error.message.startswith("RolloutFailed(")
    assert "environment: " in failed.error.message
    assert "expected_count" in failed.error.message
    assert not failed.scores
    assert [score_of(by_line[line]).value for line in (1, 2)] == [1.0, 0.0]
    solved = by_line[1]
    assert str(solved.id).startswith(f"{COUNTER}/")
    assert (log.eval.task, log.eval.task_registry_name) == (COUNTER, "gymgate/nemo_gym")
    assert score_of(solved).answer == FINAL
    assert solved.metadata["row"]["expected_count"] == 6
    assert solved.model_usage["openai-api/local/scripted"].total_tokens == 4 * 5
    events = [event for event in solved.events if isinstance(event, ModelEvent)]
    assert len(events) == 4
    assert all(event.config.temperature == 0.25 for event in events)
    assert [tool.name for tool in events[0].tools] == ["increment_counter", "get_counter_value"]
    calls = [
        (call.function, call.arguments)
        for message in solved.messages
        if isinstance(message, ChatMessageAssistant)
        for call in message.tool_calls or []
    ]
    assert calls == [(name, arguments) for _, name, arguments in policy.plan]
    assert [m.text for m in solved.messages if isinstance(m, ChatMessageTool)][-1] == '{"count":6}'
    items = solved.store["nemo_gym"]["result"]["response"]["output"]
    assert "<think>" not in json.dumps(items)
    reasoning = [item["summary"][0]["text"] for item in items if item["type"] == "reasoning"]
    assert reasoning == ["first one", "then two", "now look", "done"]


async def test_no_samples_time_has_the_start_of_the_stack(tmp_path: Path, policy: ScriptedPolicy) -> None:
    """The start logs its steps; what is logged within a sample's time is in the sample's events."""
    words = ("--limit", "2", "--log-level", "info", "--log-level-transcript", "info")
    log = await run(policy, tmp_path, *words)
    for sample in samples_of(log):
        steps = [event.message.message for event in sample.events if isinstance(event, LoggerEvent)]
        assert not [step for step in steps if COUNTER in step]
        assert score_of(sample).value is not None


async def test_a_limit_ends_the_rollout_unscored(tmp_path: Path, policy: ScriptedPolicy) -> None:
    """The limit is checked in the solver's context, though the calls arrive over the stack's connection."""
    log = await run(policy, tmp_path, "--limit", "1", "--token-limit", "7")
    (sample,) = samples_of(log)
    assert sample.limit is not None
    assert sample.limit.type == "token"
    assert sample.error is None
    assert policy.calls["chat"] == 2
    assert math.isnan(score_of(sample).value)
    assert score_of(sample).reason == "no_result"
    assert log.results is not None
    assert log.results.scores[0].unscored_samples == 1
    assert math.isnan(log.results.scores[0].metrics["mean"].value)
    assert (
        (tmp_path / "printed.txt").read_text().splitlines()[-1].endswith("; 1 example row, not the benchmark")
    )


async def test_ctrl_c_leaves_no_process(tmp_path: Path, policy: ScriptedPolicy) -> None:
    policy.hang = True
    args = ("-T", f"env_vars={MARK}", "--limit", "2")
    process = await start(policy, tmp_path, *args, **{MARK: str(tmp_path)})
    async with asyncio.timeout(120):
        while not policy.calls["chat"]:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.05)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(30):
        await process.communicate()
    await until_none_is_left(str(tmp_path))
    assert the_log(tmp_path).status == "cancelled"


async def test_the_models_own_error_is_the_samples(tmp_path: Path, policy: ScriptedPolicy) -> None:
    policy.fail = 400
    log = await run(policy, tmp_path, "--limit", "1", "--no-fail-on-error")
    (sample,) = samples_of(log)
    assert sample.error is not None
    assert "no capacity today" in sample.error.message
    assert not sample.scores


async def test_a_mistake_is_said_before_anything_runs(tmp_path: Path, policy: ScriptedPolicy) -> None:
    for args, expected in (
        (["env=mcqaa"], "mcqa"),
        (["environment=mcqa"], "-T environment: no such argument"),
        (["env=simpleqa"], """give -T models='{"NAME": "URL", ...}'"""),
    ):
        process = await start(policy, tmp_path, *(each for arg in args for each in ("-T", arg)))
        out, _ = await process.communicate()
        assert process.returncode != 0
        assert expected in out.decode()
        assert not policy.calls


@pytest.mark.heavy
async def test_a_cached_answer_asks_no_endpoint(
    tmp_path: Path, policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path / "cache"))
    for number in (1, 2):
        (tmp_path / f"{number}").mkdir()
        log = await run(policy, tmp_path / f"{number}", "--limit", "1", "--cache", "1h")
        (sample,) = samples_of(log)
        assert score_of(sample).value == 1.0
    assert policy.calls["chat"] == 4


@pytest.mark.heavy
async def test_a_stack_that_dies_fails_its_sample_and_the_next_gets_another(
    tmp_path: Path, policy: ScriptedPolicy
) -> None:
    policy.hang = True
    args = ("-T", f"env_vars={MARK}", "--limit", "2", "--max-samples", "1", "--no-fail-on-error")
    process = await start(policy, tmp_path, *args, **{MARK: str(tmp_path)})
    async with asyncio.timeout(120):
        while not policy.calls["chat"]:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.05)
    daemon = daemon_of(process.pid)
    assert daemon is not None
    policy.hang = False
    os.kill(daemon, signal.SIGKILL)
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    lost, scored = sorted(samples_of(the_log(tmp_path)), key=lambda sample: sample.error is None)
    assert lost.error is not None
    assert "daemon" in lost.error.message
    assert not lost.scores
    assert not math.isnan(score_of(scored).value)
    await until_none_is_left(str(tmp_path))


def test_inspect_lists_the_task() -> None:
    source = Path(gymgate.__file__).parent / "integrations"
    done = subprocess.run(
        [INSPECT, "list", "tasks", "inspect"],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "inspect/task.py@nemo_gym"
