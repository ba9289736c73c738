"""Evaluations with a real model on vLLM: its own parser reads the tool calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymgate import open_rows

pytestmark = [pytest.mark.gym, pytest.mark.timeout(500)]  # the first test waits for the server

WEATHER = "example_single_tool_call"


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
