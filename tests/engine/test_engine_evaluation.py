"""Evaluations with a real model on vLLM: its own parser reads the tool calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymgate import open_rows
from gymgate.runs.stored.gym_rollouts import agent_ref

pytestmark = [pytest.mark.gym, pytest.mark.timeout(500)]  # the first test waits for the server

WEATHER = "example_single_tool_call"
_FOLDED = "policy_model.responses_api_models.vllm_model.replace_developer_role_with_system"
"""As gymgate does for chat endpoints."""


def gymgate(*arguments: str | Path) -> str:
    """Standard output of the command, which must succeed."""
    command = [sys.executable, "-m", "gymgate", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def forced_rows(path: Path, count: int, **fields: Any) -> Path:
    """Packaged rows whose every answer is a tool call: vLLM guides the sampling by the tools' schemas."""
    with path.open("w") as file:
        for row in list(open_rows(WEATHER))[:count]:
            data = row.data
            data["responses_create_params"] |= {"tool_choice": "required", "temperature": 0, **fields}
            file.write(json.dumps(data) + "\n")
    return path


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_a_tool_is_called_and_its_result_comes_back(dialect: str, vllm_url: str, tmp_path: Path) -> None:
    """Each answer is a call if vLLM is sent `strict`. Chat endpoints are not, so their second answer may be text."""
    rows = forced_rows(tmp_path / "rows.jsonl", 2, max_output_tokens=256 if dialect == "chat" else 64)
    output = tmp_path / "run"
    gymgate(
        *("run", WEATHER, "--data", rows, "-b", f"{vllm_url}/v1", "--dialect", dialect, "-o", output),
        *("--set", f"{WEATHER}_simple_agent.responses_api_agents.simple_agent.max_steps=2"),
    )
    results = [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]
    assert len(results) == 2
    for result in results:
        assert result["error"] is None
        assert result["reward"] is not None
        assert len(result["calls"]) == 2
        items = [item["type"] for item in result["result"]["response"]["output"]]
        assert items.count("function_call") in ((1, 2) if dialect == "chat" else (2,))
        assert items.count("function_call_output") == items.count("function_call")


@pytest.mark.heavy
def test_an_environment_server_gives_what_it_gives_nemo_gyms_own_collector(
    vllm_url: str, tmp_path: Path
) -> None:
    """The release's `single_agent_turn_legacy`, one row at a time at temperature 0: transcript and reward of each row."""
    from benchmarks.agreement import CASES, VLLM_MODEL, write_rows
    from benchmarks.doors import transcript
    from benchmarks.engine.server import MODEL
    from benchmarks.gym_collector import SHARED, stock_stack

    config, agent = f"{WEATHER}_single_agent_turn", f"{WEATHER}_session_agent"
    rows = tmp_path / "rows.jsonl"
    write_rows(next(case for case in CASES if case.environment == WEATHER), rows, 5)
    data = [json.loads(line) for line in rows.read_text().splitlines()]
    rows.write_text("".join(f"{json.dumps({**row, 'agent_ref': agent_ref(agent)})}\n" for row in data))
    steps = f"{agent}.responses_api_agents.simple_agent.max_steps"
    servers = (*SHARED, "environment_servers/single_agent_turn_legacy", "responses_api_models/vllm_model")
    stock = stock_stack(
        f"{vllm_url}/v1",
        environments=[WEATHER],
        servers=servers,
        model_configs=(VLLM_MODEL,),
        overrides={steps: "2", "policy_model_name": MODEL, _FOLDED: "true"},
        config=config,
    )
    with stock as collector:
        log = collector.run(agent, rows, tmp_path / "gym.jsonl")
    assert (tmp_path / "gym.jsonl").exists(), log[-3000:]
    options = ("--config", config, "--data", rows, "-b", f"{vllm_url}/v1", "-c", "1", "-o", tmp_path / "run")
    gymgate("run", WEATHER, *options, "--set", f"{steps}=2")
    theirs = [json.loads(line) for line in (tmp_path / "gym.jsonl").read_text().splitlines()]
    ours = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert {line["_ng_environment_server"] for line in theirs} == {config}
    assert len(ours) == len(theirs) == 5
    by_row = {line["_ng_task_index"]: line for line in theirs}
    for mine in ours:
        other = by_row[mine["line"] - 1]
        assert mine["reward"] == other["reward"]
        assert transcript(mine["result"]) == transcript(other)
    assert "function_call" in [kind for line in theirs for kind, *_ in transcript(line)]
