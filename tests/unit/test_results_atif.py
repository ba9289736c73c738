"""Collected rollouts as ATIF trajectories. NeMo Gym's own reader reads them in tests/integration/test_export_atif.py."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from gymgate.cli.export import command
from gymgate.core.errors import ConfigError
from gymgate.results.atif import MANIFEST, Trajectory, content_of
from gymgate.rollouts.record import UNDELIVERED
from gymgate.rollouts.row import row_key

PARAMS: dict[str, Any] = {
    "instructions": "be brief",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}],
    "tools": [{"type": "function", "name": "look", "parameters": {}}],
}
OUTPUT: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "name": "look", "arguments": '{"a": 1}', "call_id": "c"},
    {"type": "function_call_output", "output": "cold", "call_id": "c"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "it is cold"}]},
]
ROW: dict[str, Any] = {"responses_create_params": PARAMS}


def line(repeat: int, **fields: Any) -> dict[str, Any]:
    """A rollout of a tool call and an answer, whose endpoint counted the tokens of both calls, and a judge's call."""
    usage = {"input_tokens": 30, "output_tokens": 7, "cached_tokens": 10, "reasoning_tokens": None}
    calls = [
        {"index": index, "dialect": "chat", "usage": usage, "started_s": 1.0 + index, "duration_s": 0.5}
        for index in range(2)
    ]
    judge = {"index": 2, "model_server": "judge", "dialect": "chat", "usage": usage}
    return {
        **{"row_key": row_key(ROW), "occurrence": 0, "repeat": repeat, "seed": None, "id": f"id{repeat}"},
        **{"environment": "weather", "agent": "weather_agent", "task": 0, "source": "rows.jsonl", "line": 1},
        **{"status": "completed", "reward": 0.5, "reward_parts": {"style": 0.25}, "metrics": {"length": 3.0}},
        **{"error": None, "attempt": 0, "finished": 1_700_000_010.0, "timing": {"total_s": 4.0}},
        "result": {**ROW, "response": {"output": OUTPUT}},
        "calls": [*calls, judge],
        **fields,
    }


def failure(repeat: int) -> dict[str, Any]:
    error = {"kind": "policy", "type": "PolicyError", "message": "no capacity today", "status_code": 503}
    kept = {**line(repeat), "final": True, "error": error, "seconds": 2.5}
    return {
        name: value
        for name, value in kept.items()
        if name not in ("id", "status", "result", "calls", "timing")
    } | {"reward": None}


def export(
    directory: Path,
    rollouts: list[dict[str, Any]],
    failures: list[dict[str, Any]] = [],  # noqa: B006
) -> dict[str, dict[str, Any]]:
    """Trajectories by file."""
    run = directory / "run"
    run.mkdir()
    settings = {"nemo_gym": "0.7.0", "policy": {"type": "http", "model": "small"}}
    (run / "run.json").write_bytes(orjson.dumps({"format": 1, "settings": settings, "extent": {}}))
    for name, lines in (("rollouts", rollouts), ("failures", failures)):
        (run / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in lines))
    done = CliRunner().invoke(
        command, [str(run), "--to", "atif", "-o", str(directory / "out")], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return {path.name: orjson.loads(path.read_bytes()) for path in (directory / "out").glob("*.json")}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(ROW) + b"\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_conversation_becomes_steps_with_the_metrics_of_their_calls(directory: Path) -> None:
    [(name, trajectory)] = export(directory, [line(0)]).items()
    assert (name, trajectory["schema_version"], trajectory["trajectory_id"]) == (
        "0-0.json",
        "ATIF-v1.7",
        "id0",
    )
    assert trajectory["agent"] == {
        "name": "weather_agent", "version": "0.7.0", "model_name": "small", "tool_definitions": PARAMS["tools"]
    }  # fmt: skip
    system, user, call, answer = trajectory["steps"]
    assert system == {"step_id": 1, "source": "system", "message": "be brief"}
    assert user == {"step_id": 2, "source": "user", "message": "weather?"}
    metrics = {"prompt_tokens": 30, "completion_tokens": 7, "cached_tokens": 10}
    assert call == {
        **{"step_id": 3, "source": "agent", "message": "", "reasoning_content": "hm"},
        "tool_calls": [{"tool_call_id": "c", "function_name": "look", "arguments": {"a": 1}}],
        "observation": {"results": [{"source_call_id": "c", "content": "cold"}]},
        **{"timestamp": "2023-11-14T22:13:27.500000+00:00", "llm_call_count": 1, "metrics": metrics},
    }
    assert (answer["message"], answer["metrics"]) == ("it is cold", metrics)
    totals = {"total_prompt_tokens": 60, "total_completion_tokens": 14, "total_cached_tokens": 20}
    assert trajectory["final_metrics"] == {**totals, "total_steps": 4}
    extra = trajectory["extra"]["gymgate"]
    assert (extra["status"], extra["reward"], extra["reward_parts"]) == ("completed", 0.5, {"style": 0.25})
    assert (extra["environment"], extra["line"], extra["metrics"]) == ("weather", 1, {"length": 3.0})


def test_what_does_not_count_has_no_reward_and_no_token_is_made_up(directory: Path) -> None:
    uncounted = [{"index": 0, "dialect": "chat", "usage": {"input_tokens": 5}}]
    trajectories = export(
        directory,
        [
            line(0, status="masked", reward=0.0),
            line(1, calls=uncounted),
            line(2, status="truncated", result=None),
        ],
        [failure(3)],
    )
    masked, alone, cut, failed = (trajectories[f"0-{number}.json"] for number in range(4))
    extra = masked["extra"]["gymgate"]
    assert (extra["outcome"], extra["reward"], extra["reward_parts"]) == ("masked", None, {})
    assert alone["final_metrics"] == {"total_prompt_tokens": 5, "total_steps": 4}
    assert not any("metrics" in step for step in alone["steps"])
    assert [step["source"] for step in cut["steps"]] == ["system", "user"]  # of the row
    extra = failed["extra"]["gymgate"]
    assert (extra["outcome"], extra["reward"], extra["error"]["type"]) == ("failed", None, "PolicyError")
    assert (extra["error"]["status_code"], extra["timing"]["total_s"]) == (503, 2.5)
    assert [step["message"] for step in failed["steps"]] == ["be brief", "weather?"]
    assert failed["final_metrics"] == {"total_steps": 2}
    manifest = [orjson.loads(each) for each in (directory / "out" / MANIFEST).read_bytes().splitlines()]
    assert [each["trajectory_path"] for each in manifest] == ["0-0.json", "0-1.json"]


def test_a_failure_whose_row_is_gone_says_why_it_failed(directory: Path) -> None:
    (directory / "rows.jsonl").unlink()
    [failed] = export(directory, [], [failure(0)]).values()
    [step] = failed["steps"]
    assert step["source"] == "system"
    assert "no capacity today" in step["message"]


@pytest.mark.parametrize(
    ("answer", "sources"),
    [
        ({**ROW, "response": "none of Responses"}, ["system", "user"]),
        ({"responses_create_params": ["?"], "response": {"output": OUTPUT[3:]}}, ["agent"]),
        ({"responses_create_params": {"input": 5}, "response": ["?"]}, ["system"]),
        ({**ROW, "response": {"output": [{"type": 5, "x": 1}]}}, ["system", "user", "system"]),
    ],
)
def test_an_agent_may_answer_anything(answer: dict[str, Any], sources: list[str], directory: Path) -> None:
    trajectories = export(directory, [line(0), line(1, result=answer)])
    assert [step["source"] for step in trajectories["0-1.json"]["steps"]] == sources


def test_items_of_other_kinds_keep_their_content() -> None:
    trajectory = Trajectory()
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    trajectory.add({"role": "user", "content": [{"type": "input_text", "text": "see"}, picture]}, copied=True)
    trajectory.add({"role": "assistant", "content": "an earlier answer"}, copied=True)
    trajectory.add({"type": "message", "role": "assistant", "content": "I look"})
    trajectory.add({"type": "function_call", "name": "look", "arguments": "{broken", "call_id": "a"})
    trajectory.add({"type": "web_search_call", "id": "w", "action": {"query": "q"}})
    trajectory.add(
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]}
    )
    trajectory.add({"type": "function_call_output", "call_id": "nobody", "output": "y"})
    trajectory.add({"role": "user", "content": "and now?"})
    trajectory.add({"type": "message", "role": "assistant", "content": "done"})
    user, earlier, looking, orphan, again, done = trajectory.steps
    assert user["message"][1] == {
        "type": "image", "source": {"media_type": "image/png", "path": "data:image/png;base64,AAAA"}
    }  # fmt: skip
    assert (earlier["source"], earlier["is_copied_context"]) == ("agent", True)
    assert [each["function_name"] for each in looking["tool_calls"]] == ["look", "web_search"]
    assert [each["arguments"] for each in looking["tool_calls"]] == [
        {"raw_arguments": "{broken"},
        {"query": "q"},
    ]
    assert looking["message"] == "I look"
    assert looking["observation"]["results"] == [{"source_call_id": "a", "content": "x"}]
    assert orphan["observation"]["results"] == [{"content": "y"}]
    assert (again["source"], again["message"]) == ("user", "and now?")
    assert trajectory.sampled == [looking, done]


def test_an_image_whose_type_cannot_be_told_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.13 on, `mimetypes` raises for such a URL."""
    image = {"type": "input_image", "image_url": "http://[::1/x.png"}

    def guess_type(url: str) -> tuple[str | None, str | None]:
        raise ValueError("Invalid IPv6 URL")

    monkeypatch.setattr(mimetypes, "guess_type", guess_type)
    assert "http://[::1/x.png" in str(content_of([image]))


def test_nothing_is_written_over_and_a_file_of_rollouts_is_refused(directory: Path) -> None:
    export(directory, [line(0)])
    arguments = [str(directory / "run"), "--to", "atif", "-o", str(directory / "out")]
    assert isinstance(CliRunner().invoke(command, arguments).exception, ConfigError)
    rollouts = directory / "copy.jsonl"
    rollouts.write_bytes((directory / "run" / "rollouts.jsonl").read_bytes())
    refused = CliRunner().invoke(command, [str(rollouts), "--to", "atif", "-o", str(directory / "other")])
    assert isinstance(refused.exception, ConfigError)
    assert not (directory / "other").exists()


def test_an_answer_that_nobody_got_is_no_step(directory: Path) -> None:
    """The agent asked again, so that there is a call more than there are steps."""
    [first, second, judge] = line(0)["calls"]
    lost = {**first, "details": {UNDELIVERED: "chatcmpl-1"}}
    [trajectory] = export(directory, [line(0, calls=[lost, first, second, judge])]).values()
    assert [step["metrics"]["prompt_tokens"] for step in trajectory["steps"][2:]] == [30, 30]
    assert trajectory["final_metrics"]["total_prompt_tokens"] == 60
