"""Agents that speak Anthropic messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gymgate.core.config import Dialect
from gymgate.core.errors import ConfigError
from gymgate.gateway.dialects import ConversationMemory, encode_stream, translate_answer, translate_request

Json = dict[str, Any]
PNG: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}


def to_chat(*messages: Json, **body: Any) -> Json:
    return translate_request(
        {"model": "m", "max_tokens": 9, "messages": list(messages), **body}, "messages", "chat"
    )


def test_conversation() -> None:
    chat = to_chat(
        {
            "role": "user",
            "content": [{"type": "text", "text": "see", "cache_control": {"type": "ephemeral"}}, PNG],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "ok"},
                use({"x": 1}),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}, PNG]},
                {"type": "text", "text": "go on"},
            ],
        },
        system=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert chat["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1"}, image]},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_settings(choice: Json, expected: Any) -> None:
    chat = to_chat(
        {"role": "user", "content": "hi"},
        temperature=0.5,
        top_k=4,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice=choice,
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        stream=True,
    )
    assert chat.pop("parallel_tool_calls", None) is (False if choice["type"] == "auto" else None)
    assert chat == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "stop": ["x"],
        "user": "u",
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
            }
        ],
        "tool_choice": expected,
        "reasoning_effort": "high",
        "stream": True,
    }


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "search_result"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "alien"),
        ({"tool_choice": {"type": "odd"}, "tools": [{"name": "f"}]}, "odd"),
    ],
)
def test_what_cannot_be_expressed_is_named(body: Json, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        translate_request({"messages": [], **body}, "messages", "chat")


def chat_answer(finish: str = "stop", **message: Any) -> Json:
    return {
        "model": "up",
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
    }


def call(arguments: str) -> Json:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


def text(value: str) -> Json:
    return {"type": "text", "text": value, "citations": None}


def use(given: Json) -> Json:
    return {"type": "tool_use", "id": "a", "name": "f", "input": given, "caller": {"type": "direct"}}


@pytest.mark.parametrize(
    ("answer", "blocks", "stop_reason"),
    [
        (chat_answer(content="x"), [text("x")], "end_turn"),
        (chat_answer(content=None), [text("")], "end_turn"),
        (chat_answer("length", content="x"), [text("x")], "max_tokens"),
        (chat_answer("content_filter", content="x"), [text("x")], "refusal"),
        (chat_answer(content=None, refusal="no"), [text("no")], "refusal"),
        (
            chat_answer("tool_calls", content=None, reasoning="r", tool_calls=[call('{"x": 1}')]),
            [
                {"type": "thinking", "thinking": "r", "signature": "Z3ltZ2F0ZQ=="},
                use({"x": 1}),
            ],
            "tool_use",
        ),
        (
            chat_answer(content=None, tool_calls=[call('{"x": 1180591620717411303425}')]),
            [use({"x": 2**70 + 1})],
            "tool_use",
        ),
        (
            chat_answer("length", content=None, tool_calls=[call("{}")]),
            [use({})],
            "max_tokens",
        ),
        (
            chat_answer(content=None, tool_calls=[call("[1]")]),
            [use({"arguments": "[1]"})],
            "tool_use",
        ),
        (
            chat_answer(content=None, tool_calls=[call("{broken")]),
            [use({"arguments": "{broken"})],
            "tool_use",
        ),
    ],
)
def test_answer(answer: Json, blocks: list[Json], stop_reason: str) -> None:
    message = translate_answer(answer, {"messages": []}, "chat", "messages")
    assert message["content"] == blocks
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "up")
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, None)
    counts = {name: count for name, count in message["usage"].items() if count is not None}
    assert counts == {
        "input_tokens": 2,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "output_tokens": 2,
    }


def test_fields_that_anthropics_schema_requires_are_there_plain_and_streamed() -> None:
    """The names are those that its schema of November 2026 requires; clients made from a schema refuse a message without them."""
    whole = {
        "id",
        "type",
        "role",
        "content",
        "model",
        "stop_reason",
        "stop_sequence",
        "stop_details",
        "usage",
        "container",
    }
    counts = {"input_tokens", "output_tokens", "output_tokens_details", "server_tool_use"}
    counts |= {"cache_creation_input_tokens", "cache_read_input_tokens"}
    message = translate_answer(chat_answer(content="x"), {"messages": []}, "chat", "messages")
    events = b"".join(encode_stream(message, "messages", {})).decode().split("\n\n")
    [start, *_, delta, _] = [json.loads(event.partition("data: ")[2]) for event in events if event]
    for given in (message, start["message"]):
        assert given.keys() == whole
        assert given["usage"].keys() == counts | {"cache_creation", "inference_geo", "service_tier"}
    assert delta["delta"].keys() == {"stop_reason", "stop_sequence", "stop_details", "container"}
    assert delta["usage"].keys() >= counts


@pytest.mark.parametrize(("strict", "sent"), [({}, False), ({"strict": True}, True)])
def test_strict_is_off_for_a_responses_endpoint_unless_the_tool_says_otherwise(
    strict: Json, sent: bool
) -> None:
    """As NeMo Gym sends it; without a value a Responses endpoint takes its own default, which is on."""
    tool = {"name": "f", "input_schema": {"type": "object"}, **strict}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    assert translate_request(body, "messages", "responses")["tools"][0]["strict"] is sent
    assert translate_request(body, "messages", "chat")["tools"][0]["function"].get("strict") == strict.get(
        "strict"
    )


def test_thinking_has_a_signature_plain_and_streamed() -> None:
    """Without one litellm drops the block, and pydantic-ai sends it back as the user's text."""
    message = translate_answer(chat_answer(content="x", reasoning="r"), {"messages": []}, "chat", "messages")
    signature = message["content"][0]["signature"]
    events = b"".join(encode_stream(message, "messages", {})).decode().split("\n\n")
    data = [json.loads(event.partition("data: ")[2]) for event in events if event]
    deltas = [event["delta"] for event in data if event["type"] == "content_block_delta"]
    assert signature
    assert {"type": "signature_delta", "signature": signature} in deltas


def test_what_other_endpoints_refuse() -> None:
    """A user's id of more than 64 characters, and Anthropic's highest effort; an empty message stays one."""
    sent = to_chat(
        {"role": "user", "content": []}, metadata={"user_id": "u" * 65}, output_config={"effort": "max"}
    )
    assert "user" not in sent
    assert sent["reasoning_effort"] == "xhigh"
    assert sent["messages"] == [{"role": "user", "content": ""}]


def test_stop_sequence() -> None:
    answer = chat_answer(content="x")
    answer["choices"][0]["stop_reason"] = 128001  # the id of a token
    message = translate_answer(answer, {"messages": []}, "chat", "messages")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    answer["choices"][0]["stop_reason"] = "END"
    message = translate_answer(answer, {"messages": [], "stop_sequences": ["END"]}, "chat", "messages")
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


RESPONSE: Json = {
    "status": "completed",
    "output": [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "opaque"},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": '{ "x": 1 }'},
    ],
}
CHAT: Json = chat_answer(content="", reasoning_content="r", refusal=None, tool_calls=[call('{ "x": 1 }')])


@pytest.mark.parametrize(("endpoint", "answer"), [("chat", CHAT), ("responses", RESPONSE)])
@pytest.mark.parametrize("split", [False, True])
def test_answer_comes_back_as_it_was_given(endpoint: Dialect, answer: Json, split: bool) -> None:
    """The agent adds cache_control, and may send every block as a message of its own."""
    memory = ConversationMemory()
    user: Json = {"role": "user", "content": "hi"}
    message = translate_answer(answer, {"messages": [user]}, endpoint, "messages", memory)
    blocks = [{**block, "cache_control": {"type": "ephemeral"}} for block in message["content"]]
    groups = [[block] for block in blocks] if split else [blocks]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "out"}]}
    history = [user, *({"role": "assistant", "content": group} for group in groups), result]
    body = translate_request({"messages": history}, "messages", endpoint, memory)
    if endpoint == "chat":
        assert body["messages"][1] == CHAT["choices"][0]["message"]
        assert body["messages"][2] == {"role": "tool", "tool_call_id": "a", "content": "out"}
    else:
        assert body["input"][1:3] == RESPONSE["output"]
        assert body["input"][3] == {"type": "function_call_output", "call_id": "a", "output": "out"}
