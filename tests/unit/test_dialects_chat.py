"""Agents that speak chat-completions, endpoints that speak Responses."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate.core.errors import ConfigError, PolicyError
from gymgate.gateway.dialects import translate_answer, translate_request
from support.translation import checked_translation

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}


def to_responses(*messages: Json, **body: Any) -> Json:
    return translate_request({"messages": list(messages) or [USER], **body}, "chat", "responses")


def response(*items: Json, **fields: Any) -> Json:
    return {
        "id": "r",
        "created_at": 5.5,
        "model": "up",
        "status": "completed",
        "output": list(items),
        **fields,
    }


def answer(*items: Json, request: Json | None = None, **fields: Any) -> Json:
    given = response(*items, **fields)
    return translate_answer(given, request or {"messages": [USER]}, "responses", "chat")


def test_messages_become_items() -> None:
    body = to_responses(
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:,", "detail": "high"}},
                {"type": "file", "file": {"file_id": "f"}},
            ],
        },
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "r",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "out"},
    )
    items = body["input"]
    assert items[0] == {"type": "message", "role": "system", "content": "s"}
    assert items[1]["content"] == [{"type": "input_text", "text": "d"}]
    assert items[2]["content"] == [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "data:,", "detail": "high"},
        {"type": "input_file", "file_id": "f"},
    ]
    assert items[3].pop("id").startswith("rs_")
    assert items[3:] == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": "c"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "out"},
    ]


def test_refusals_custom_calls_and_the_same_request_twice() -> None:
    call = {"id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    messages = (
        {"role": "assistant", "content": "x", "refusal": "no", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "out"},
    )
    items = to_responses(*messages)["input"]
    assert items == to_responses(*messages)["input"]
    assert items[0]["content"] == [
        {"type": "output_text", "text": "x", "annotations": []},
        {"type": "refusal", "refusal": "no"},
    ]
    assert items[1:] == [
        {"type": "custom_tool_call", "call_id": "a", "name": "sh", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "out"},
    ]


def test_settings() -> None:
    body = to_responses(
        model="m",
        max_completion_tokens=7,
        reasoning_effort="low",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        verbosity="low",
        logprobs=True,
        top_logprobs=3,
        n=1,
        frequency_penalty=0,
        temperature=0.2,
        seed=4,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert body == {
        "model": "m",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "max_output_tokens": 7,
        "reasoning": {"effort": "low"},
        "text": {
            "format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True},
            "verbosity": "low",
        },
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        "temperature": 0.2,
        "seed": 4,
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": True,
        "stream": True,
    }


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"n": 2}, "n=2"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "narrator", "content": ""}]}, "narrator"),
        ({"messages": [{"role": "tool", "content": ""}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "hologram"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "function_call"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "audio"),
        ({"tools": [{"type": "teleport"}]}, "teleport"),
    ],
)
def test_what_responses_cannot_do_is_named(body: Json, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        translate_request({"messages": [USER], **body}, "chat", "responses")


def text_item(text: str, **part: Any) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": [], **part}]
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}


CALL: Json = {"type": "function_call", "id": "fc", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}


def test_answer_is_a_complete_completion() -> None:
    usage = {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 5,
    }
    reasoning = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "r"}]}
    completion = answer(reasoning, text_item("t"), CALL, {**CALL, "call_id": "b"}, usage=usage)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert completion == {
        "id": "r",
        "object": "chat.completion",
        "created": 5,
        "model": "up",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "t",
                    "refusal": None,
                    "reasoning_content": "r",
                    "tool_calls": [{"id": "a", **call}, {"id": "b", **call}],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
    }


@pytest.mark.parametrize(
    ("items", "fields", "finish", "content"),
    [
        ([], {}, "stop", ""),
        ([text_item("")], {}, "stop", ""),
        ([text_item("a"), text_item("b")], {}, "stop", "ab"),
        ([CALL], {}, "tool_calls", None),
        ([text_item("a")], {"status": "incomplete"}, "length", "a"),
        (
            [],
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            "content_filter",
            "",
        ),
        (
            [CALL],
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "length",
            None,
        ),
    ],
)
def test_finish_reasons_and_content(
    items: list[Json], fields: Json, finish: str, content: str | None
) -> None:
    choice = answer(*items, **fields)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == (finish, content)


def test_logprobs() -> None:
    entry = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    asked = answer(text_item("x", logprobs=[entry]), request={"messages": [USER], "logprobs": True})
    assert asked["choices"][0]["logprobs"] == {"content": [entry], "refusal": None}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"choices": []}, "output"),
        (response(status="failed", error={"code": "server_error", "message": "boom"}), "boom"),
        (response(status="in_progress"), "in_progress"),
        (response({"type": "function_call", "name": "f"}), "call_id"),
    ],
)
def test_what_is_no_answer_is_a_policy_error(given: Json, word: str) -> None:
    with pytest.raises(PolicyError, match=word):
        checked_translation(given, {"messages": [USER]}, "responses", "chat")
