"""A prompt that exceeds the policy's context counts as with NeMo Gym's own collector and its vLLM model server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.upstream import MODELS, Seen, chat_answer, upstream_in_thread

# The first use of a release installs it.
pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]

OVERFLOW = "This model's maximum context length is 4096 tokens. However, you requested 4100 tokens"


async def calls_a_tool_then_overflows(seen: Seen) -> web.Response:
    if not seen.path.endswith("/chat/completions"):
        return web.json_response(MODELS)
    body = seen.body
    if any(message["role"] == "tool" for message in body["messages"]):
        return web.json_response({"object": "error", "message": OVERFLOW, "code": 400}, status=400)
    name = body["tools"][0]["function"]["name"]
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": '{"city": "Rome"}'}}
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return web.json_response(chat_answer(choices=[choice]))


def test_both_collectors_give_the_same_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # `benchmarks`
    from benchmarks.agreement import SERVERS, VLLM_MODEL, Case, by_gym, write_rows
    from benchmarks.doors import Job, by_gymgate
    from benchmarks.gym_collector import stock_stack

    case = Case("example_single_tool_call", "tool")
    rows = tmp_path / "rows.jsonl"
    count = write_rows(case, rows, 3)
    with upstream_in_thread(calls_a_tool_then_overflows) as policy:
        url = policy.url.removesuffix("/v1")
        with stock_stack(
            f"{url}/v1", environments=[case.environment], servers=SERVERS, model_configs=(VLLM_MODEL,)
        ) as stock:
            theirs = by_gym(case, rows, tmp_path / "gym.jsonl", stock)
            bodies = [json.loads(line) for line in (tmp_path / "gym.jsonl").read_text().splitlines()]
        ours = [*by_gymgate(Job(case.environment, str(rows), {}, False, url))]
    lines = [json.loads(line) for line in (tmp_path / "rows.gymgate/rollouts.jsonl").read_text().splitlines()]
    assert len(ours) == count == 3
    assert ours == theirs
    assert all(outcome.reward is not None for outcome in ours)
    assert {body["response"]["status"] for body in bodies} == {"incomplete"}
    assert {line["result"]["response"]["status"] for line in lines} == {"incomplete"}
    assert {(line["status"], line["limit"]) for line in lines} == {("truncated", "context_length")}
