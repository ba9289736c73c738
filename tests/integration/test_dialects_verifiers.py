"""A Gym agent's rollout, read by verifiers' own dialects, is one branch of its trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from verifiers import v1 as vf
from verifiers.v1.dialects import ChatDialect, ResponsesDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from gymgate.core.config import Dialect
from gymgate.gateway.dialects import ConversationMemory, translate_answer, translate_request

Json = dict[str, Any]
TOOL: Json = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object"},
    "strict": True,
    "description": "d",
}


def call(call_id: str, arguments: str = '{"x": 1}') -> Json:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


TURNS: list[Json] = [
    {"content": None, "reasoning_content": "both at once", "tool_calls": [call("a"), call("b", '{ "x":2}')]},
    {"content": "let me see", "reasoning_content": "once more", "tool_calls": [call("c")]},
    {"content": "", "tool_calls": [call("d", "not json")]},
    {"content": "<think>inline</think>nearly", "refusal": None, "annotations": []},
    {"content": None, "reasoning_content": "only thoughts"},
    {"content": "done", "reasoning_content": "at last"},
]


def completion(message: Json) -> Json:
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 17,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def response(items: list[Json]) -> Json:
    return {
        "id": "r",
        "object": "response",
        "created_at": 17,
        "model": "m",
        "status": "completed",
        "output": items,
    }


class Interception:
    """verifiers' side of a rollout: each call is parsed, matched with the trace so far and committed to it."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect: Any = ChatDialect() if dialect == "chat" else ResponsesDialect()
        task = TraceTask(type="Task", data=vf.TaskData())
        self.trace: Trace = Trace(task=task, agent=AgentInfo(config=vf.AgentConfig(harness={"id": "null"})))

    def commit(self, body: Json, answer: Json) -> None:
        request = self.dialect.parse_request(copy.deepcopy(body))
        turn = prepare_turn(self.trace, request.messages, request.tools)
        parsed = self.dialect.response_type.model_validate(copy.deepcopy(answer))
        turn.commit(self.dialect.parse_response(parsed))


def as_resent(item: Json, keep_ids: bool) -> Json:
    """As NeMo Gym's models write an item again: nulls filled in, and ids too or not."""
    item = {name: value for name, value in item.items() if keep_ids or name != "id"}
    if item["type"] == "message":
        return {**item, "content": [{**part, "logprobs": None} for part in item["content"]]}
    return {**item, "encrypted_content": None} if item["type"] == "reasoning" else {**item, "namespace": None}


@pytest.mark.parametrize("keep_ids", [True, False])
def test_responses_agent_on_a_chat_endpoint(keep_ids: bool) -> None:
    memory, interception = ConversationMemory(), Interception("chat")
    request: Json = {
        "model": "policy",
        "input": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "parallel_tool_calls": True,
    }
    for message in TURNS:
        body = translate_request(request, "responses", "chat", memory)
        interception.commit(body, completion(message))
        heard = translate_answer(completion(message), request, "chat", "responses", memory)["output"]
        outputs = [
            {"type": "function_call_output", "call_id": entry["id"], "output": "ok"}
            for entry in message.get("tool_calls") or []
        ]
        request["input"] = [*request["input"], *(as_resent(item, keep_ids) for item in heard), *outputs]
    assert len(interception.trace.branches) == 1
    assert interception.trace.num_turns == len(TURNS)


def test_messages_agent_on_a_chat_endpoint() -> None:
    memory, interception = ConversationMemory(), Interception("chat")
    request: Json = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    for message in TURNS:
        interception.commit(translate_request(request, "messages", "chat", memory), completion(message))
        heard = translate_answer(completion(message), request, "chat", "messages", memory)["content"]
        results = [
            {"type": "tool_result", "tool_use_id": entry["id"], "content": "ok"}
            for entry in message.get("tool_calls") or []
        ]
        said = results or [{"type": "text", "text": "go on"}]
        history = [{"role": "assistant", "content": heard}, {"role": "user", "content": said}]
        request["messages"] = [*request["messages"], *history]
    assert len(interception.trace.branches) == 1
    assert interception.trace.num_turns == len(TURNS)


def test_chat_agent_on_a_responses_endpoint() -> None:
    memory, interception = ConversationMemory(), Interception("responses")
    turns: list[list[Json]] = [
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "opaque"},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "a",
                "name": "f",
                "arguments": "{}",
                "status": "completed",
            },
        ],
        [
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "done", "annotations": []}],
            }
        ],
    ]
    request: Json = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    for items in turns:
        interception.commit(translate_request(request, "chat", "responses", memory), response(items))
        heard = translate_answer(response(items), request, "responses", "chat", memory)["choices"][0][
            "message"
        ]
        outputs = [
            {"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in heard.get("tool_calls") or []
        ]
        request["messages"] = [
            *request["messages"],
            heard,
            *(outputs or [{"role": "user", "content": "go on"}]),
        ]
    assert len(interception.trace.branches) == 1
    assert interception.trace.num_turns == len(turns)
