"""What an endpoint's side tells of an answer is in the record of its call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from gymgate.core.config import POLICY, Endpoint, HTTPEndpoint, ReplayEndpoint
from gymgate.gateway.server import Gateway
from gymgate.rollouts import ModelCall
from support.upstream import Seen, chat_answer, responses_answer, upstream

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def output(text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c1", "output": text}


def recording(directory: Path, name: str = "r") -> ReplayEndpoint:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
    record = {
        "responses_create_params": {"input": "q"},
        "response": {"id": name, "output": [CALL, output("recorded"), said]},
    }
    path = directory / "r.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return ReplayEndpoint(rollouts=(str(path),))


async def record_of(policy: Endpoint, conversation: list[dict[str, Any]], *, bodies: bool) -> ModelCall:
    async with Gateway() as gateway, httpx.AsyncClient(timeout=30) as client:
        route = gateway.open(policy, record_bodies=bodies)
        answer = await client.post(f"{route.base_url}/responses", json={"model": "m", "input": conversation})
        assert answer.status_code == 200, answer.text
        (call,) = route.calls
        return ModelCall.model_validate_json(call.model_dump_json())


@pytest.mark.parametrize("bodies", [True, False])
async def test_a_replay_says_that_a_tool_answered_otherwise_than_recorded(
    tmp_path: Path, bodies: bool
) -> None:
    asked = [{"role": "user", "content": "q"}, CALL]
    call = await record_of(recording(tmp_path), [*asked, output("otherwise")], bodies=bodies)
    assert call.details == {"recording": "r.jsonl:1", "index": 0, "turn": 1, "turns": 2, "match": "loose"}
    call = await record_of(recording(tmp_path), [*asked, output("recorded")], bodies=bodies)
    assert call.details == {"recording": "r.jsonl:1", "index": 0, "turn": 1, "turns": 2, "match": "exact"}


async def test_rollouts_share_the_backend_of_a_recording_until_its_file_changes(tmp_path: Path) -> None:
    """A backend of each rollout's own asks a thread for its index: a third of the rollouts per second."""

    def backend(gateway: Gateway) -> object:
        target = gateway.open(endpoint).target(POLICY)
        return target and target.backend

    endpoint = recording(tmp_path)
    async with Gateway() as gateway:
        first = backend(gateway)
        assert first is backend(gateway)
        recording(tmp_path, name="renamed")
        assert first is not backend(gateway)


async def test_a_pinned_recording_answers_alone(tmp_path: Path) -> None:
    """Rollouts of one row differ by the recording that each is pinned to."""
    pinned = recording(tmp_path)
    pinned = pinned.model_copy(update={"rollouts": pinned.rollouts * 3})
    for index in (2, 1):
        asked = [{"role": "user", "content": "q"}]
        call = await record_of(pinned.model_copy(update={"index": index}), asked, bodies=False)
        assert call.details["index"] == index


async def test_an_http_endpoint_says_its_replica_and_its_retries() -> None:
    async def busy_once(seen: Seen) -> web.StreamResponse:
        if len(policy.seen) == 1:
            return web.Response(status=429, headers={"Retry-After": "0"})
        return web.json_response(chat_answer())

    async with upstream(busy_once) as policy, upstream() as other:
        alone = HTTPEndpoint(base_url=policy.url, max_retries=1)
        question = [{"role": "user", "content": "q"}]
        assert (await record_of(alone, question, bodies=False)).details == {"retries": 1}
        assert (await record_of(alone, question, bodies=False)).details == {}
        two = HTTPEndpoint(base_url=policy.url, replicas=(other.url,))
        assert (await record_of(two, question, bodies=False)).details == {"replica": policy.url}


@pytest.mark.parametrize("agent", ["responses", "chat/completions"])
@pytest.mark.parametrize("dialect", ["responses", "chat"])
async def test_ids_that_an_endpoint_numbers_reach_the_agent_as_text(agent: str, dialect: Any) -> None:
    """NeMo Gym's agents refuse numbers, which would be the environment's failure."""
    function = {"name": "look", "arguments": "{}"}

    async def numbers(seen: Seen) -> web.StreamResponse:
        if dialect == "responses":
            item = {"type": "function_call", "id": 7, "call_id": 8, "status": "completed", **function}
            return web.json_response(responses_answer(id=6, output=[item]))
        calls = [{"id": 8, "type": "function", "function": function}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response(chat_answer(id=6, choices=[choice]))

    body = {"model": "m", "input": "q"} if agent == "responses" else {"model": "m", "messages": []}
    async with upstream(numbers) as policy, Gateway() as gateway, httpx.AsyncClient(timeout=30) as client:
        route = gateway.open(policy.endpoint(dialect=dialect))
        answer = (await client.post(f"{route.base_url}/{agent}", json=body)).json()
    assert isinstance(answer["id"], str)
    call = answer["output"][0] if agent == "responses" else answer["choices"][0]["message"]["tool_calls"][0]
    assert call["call_id" if agent == "responses" else "id"] == "8"
    assert isinstance(call.get("id"), str)
