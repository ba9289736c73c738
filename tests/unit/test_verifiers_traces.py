"""Collected rollouts as verifiers' saved traces, read back with verifiers' own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

from verifiers.v1.state import State
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.trace_store import read_episodes

from gymgate.cli.export import command
from gymgate.core.errors import ConfigError
from gymgate.integrations.verifiers.evaluation import metrics_of

RESULT: dict[str, Any] = {
    "responses_create_params": {
        "input": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        ]
    },
    "response": {
        "output": [
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "name": "look", "arguments": '{"a": 1}', "call_id": "c"},
            {"type": "function_call_output", "output": "cold", "call_id": "c"},
            {
                "type": "message",
                "id": "m",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "it is cold", "annotations": []}],
            },
        ]
    },
}


def rollout(repeat: int, **fields: Any) -> dict[str, Any]:
    usage = {"input_tokens": 30, "output_tokens": 7, "cached_tokens": 10, "reasoning_tokens": None}
    calls = [
        {"index": index, "dialect": "responses", "usage": usage, "started_s": 1.0 + index, "duration_s": 0.5}
        | {"finish_reason": reason}
        for index, reason in enumerate(("tool_calls", "stop"))
    ]
    judge = {"index": 2, "model_server": "judge", "dialect": "chat", "usage": usage, "started_s": 3.0}
    return {
        **{"row_key": "0123456789abcdef", "occurrence": 0, "repeat": repeat, "seed": 4, "id": f"id{repeat}"},
        **{"environment": "weather", "agent": "weather_agent", "status": "completed", "reward": 0.5},
        **{
            "reward_parts": {"style": 0.25},
            "metrics": {"length": 3.0},
            "result": RESULT,
            "calls": [*calls, judge],
        },
        **{
            "timing": {"total_s": 4.0, "model_s": 1.0, "judge_s": 0.0},
            "task": 2,
            "source": "rows.jsonl",
            "line": 3,
        },
        **{"finished": 1_700_000_010.0, "segments": [], "error": None, "attempt": 0, **fields},
    }


def read(tmp_path: Path, lines: list[dict[str, Any]]) -> list[Any]:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_bytes(orjson.dumps({"format": 1, "settings": {}, "extent": {}}))
    (run / "rollouts.jsonl").write_bytes(
        b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    )
    done = CliRunner().invoke(
        command, [str(run), "--to", "traces", "-o", str(tmp_path / "out" / "traces.jsonl")]
    )
    assert done.exit_code == 0, done.output
    return read_episodes(tmp_path / "out", Trace[WireTaskData, State])


def test_a_conversation_becomes_a_branch(tmp_path: Path) -> None:
    [episode] = read(tmp_path, [rollout(0)])
    [trace] = episode.traces
    assert (episode.ok, episode.env.id, episode.env.name, trace.id) == (
        True,
        "nemo-gym-env",
        "weather",
        "id0",
    )
    assert episode.task.key == "weather/0123456789abcdef"
    [branch] = trace.branches
    roles = [message.role for message in branch.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert [node.sampled for node in branch.nodes] == [False, False, True, False, True]
    call, answer = branch.messages[2], branch.messages[4]
    assert call.tool_calls[0].name == "look"
    assert call.reasoning_content == "hm"
    assert branch.messages[3].content == "cold"
    assert answer.content == "it is cold"
    assert [each.node for each in trace.calls] == [2, 4]
    assert trace.usage.completion_tokens == 14
    assert trace.calls[0].usage.prompt_tokens == 20
    assert len(trace.extra_usage) == 1
    assert trace.reward == 0.5
    assert trace.metrics["length"] == 3.0
    assert trace.timing.start == 1_700_000_006.0
    assert trace.info["nemo_gym"]["result"] == RESULT
    metrics = metrics_of([episode])[0].counts
    assert (metrics.rollouts, metrics.failed, metrics.scored, metrics.mean_reward) == (1, 0, 1, 0.5)


def test_what_is_not_scored_stays_unscored(tmp_path: Path) -> None:
    masked, truncated, unscored = read(
        tmp_path,
        [rollout(0, status="masked"), rollout(1, status="truncated", result=None), rollout(2, reward=None)],
    )
    assert masked.traces[0].rewards["reward"] is None
    assert not masked.traces[0].agent.trainable
    assert truncated.traces[0].stop_condition == "max_turns"
    assert truncated.traces[0].nodes == []
    assert unscored.traces[0].metrics["nemo_gym/unscored"] == 1.0
    assert len({episode.group.id for episode in (masked, truncated, unscored)}) == 1


def test_gym_rollouts_become_traces_too(tmp_path: Path) -> None:
    line = {**RESULT, "_ng_task_index": 0, "_ng_rollout_index": 1, "agent_ref": {"name": "a"}, "reward": 1.0}
    (tmp_path / "r.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    done = CliRunner().invoke(
        command, [str(tmp_path / "r.jsonl"), "--to", "traces", "-o", str(tmp_path / "traces.jsonl")]
    )
    assert done.exit_code == 0, done.output
    [episode] = read_episodes(tmp_path, Trace[WireTaskData, State])
    assert episode.traces[0].reward == 1.0
    assert len(episode.traces[0].nodes) == 5
    wrong = CliRunner().invoke(
        command, [str(tmp_path / "r.jsonl"), "--to", "traces", "-o", str(tmp_path / "t.parquet")]
    )
    assert isinstance(wrong.exception, ConfigError)


@pytest.mark.parametrize(
    "result", [{"responses_create_params": {"input": 5}}, {"responses_create_params": [1]}, {"response": "x"}]
)
def test_a_result_without_a_conversation_is_a_trace_without_messages(
    tmp_path: Path, result: dict[str, Any]
) -> None:
    """An agent may answer anything."""
    (episode,) = read(tmp_path, [rollout(0, result=result)])
    assert episode.traces[0].nodes == []
