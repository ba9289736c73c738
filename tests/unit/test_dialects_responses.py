"""Agents that speak Responses, endpoints that speak chat-completions."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate.core.errors import ConfigError, PolicyError
from gymgate.gateway.dialects import translate_answer, translate_request, with_text_ids
from gymgate.gateway.dialects.answers import response_object, with_call_ids
from support.translation import checked_translation

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}


def to_chat(**body: Any) -> Json:
    return translate_request({"input": "hi", **body}, "responses", "chat")


def messages(*items: Json, **body: Any) -> list[Json]:
    return list(to_chat(input=list(items), **body)["messages"])


def chat_answer(message: Json, finish_reason: str = "stop", **choice: Any) -> Json:
    given = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": finish_reason,
        **choice,
    }
    return {"id": "c", "object": "chat.completion", "created": 17.9, "model": "up", "choices": [given]}


def answer(message: Json, finish_reason: str = "stop", request: Json | None = None, **choice: Any) -> Json:
    given = chat_answer(message, finish_reason, **choice)
    return translate_answer(given, request or {"input": "hi"}, "chat", "responses")


def test_same_dialect_is_the_same_object() -> None:
    body = {"input": "hi", "unknown": 1}
    assert translate_request(body, "responses", "responses") is body
    given = chat_answer({"content": "x"})
    assert translate_answer(given, {}, "chat", "chat") is given


def test_the_model_s_own_finish_reason_stays() -> None:
    """OpenRouter and others add it to a choice; NeMo Gym 0.7.0 has it at the top of the response."""
    response = answer({"content": "x"}, "content_filter", native_finish_reason="refusal")
    assert response["native_finish_reason"] == "refusal"
    assert "native_finish_reason" not in answer({"content": "x"})


def test_roles_and_instructions() -> None:
    said = messages(
        {"role": "developer", "content": "dev"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "sys"}]},
        USER,
        {"role": "assistant", "content": "before"},
    )
    assert said == [
        {"role": "system", "content": "dev"},  # many chat templates refuse the role `developer`
        {"role": "system", "content": [{"type": "text", "text": "sys"}]},
        USER,
        {"role": "assistant", "content": "before"},
    ]


def test_instructions_and_leading_system_messages_are_one_system_message() -> None:
    """As NeMo Gym sends Codex's requests: Qwen3.5's chat template, e.g., refuses a second system message."""
    image = {"type": "input_image", "image_url": "data:,"}
    text = {"type": "input_text", "text": "sys"}
    developer = {"role": "developer", "content": "dev"}
    system = {"type": "message", "role": "system", "content": [text, text]}
    said = messages(developer, system, USER, developer, instructions="be brief")
    assert said == [
        {"role": "system", "content": "be brief\n\ndev\n\nsyssys"},
        USER,
        {"role": "system", "content": "dev"},
    ]
    assert messages(USER, instructions="be brief") == [{"role": "system", "content": "be brief"}, USER]
    assert to_chat(instructions="be brief")["messages"] == [{"role": "system", "content": "be brief"}, USER]
    kept = messages({"role": "system", "content": [text, image]}, instructions="be brief")
    assert [part["type"] for part in kept[1]["content"]] == ["text", "image_url"]


def test_chat_shaped_turns_are_translated_whole() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    asked = {"role": "assistant", "content": "let me see", "reasoning": "why", "tool_calls": [call]}
    silent = {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "b"}]}
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    parts = [{"type": "text", "text": "2"}]
    said = messages(
        USER,
        asked,
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"type": "message", **silent},
        {"role": "tool", "tool_call_id": "b", "content": parts},
        refused,
    )
    assert said == [
        USER,
        {**asked, "reasoning_content": "why"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        silent,
        {"role": "tool", "tool_call_id": "b", "content": parts},
        {"role": "assistant", "content": "", "refusal": "no"},
    ]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        ),
        (
            {"type": "input_image", "image_url": "http://x/y.png"},
            {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        ),
        (
            {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"},
            {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"}},
        ),
        (
            {"type": "input_video", "video_url": "http://v"},
            {"type": "video_url", "video_url": {"url": "http://v"}},
        ),
    ],
)
def test_content_parts(part: Json, expected: Json) -> None:
    assert messages({"role": "user", "content": [part]})[0]["content"] == [expected]


def test_assistant_items_of_one_turn_are_one_message() -> None:
    said = messages(
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "why"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "let me see", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "2"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "function_call_output", "call_id": "c", "output": {"n": 3}},
    )
    assert said == [
        USER,
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "why",
            "reasoning": "why",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {
            "role": "tool",
            "tool_call_id": "b",
            "content": [{"type": "text", "text": "2"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": '{"n":3}'},
    ]


def test_two_texts_are_two_messages_and_a_refusal_is_kept() -> None:
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    said = messages(USER, {"role": "assistant", "content": "one"}, refusal)
    assert said[1:] == [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "", "refusal": "no"},
    ]


def test_reasoning_itself_goes_before_its_summary() -> None:
    item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "short"}],
        "content": [{"type": "reasoning_text", "text": "long"}],
        "encrypted_content": "opaque",
    }
    assert messages(USER, item)[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "long",
        "reasoning": "long",
    }


def test_settings() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    chat = to_chat(
        model="m",
        max_output_tokens=5,
        temperature=0.0,
        top_p=0.5,
        seed=3,
        stop=["x"],
        top_logprobs=2,
        reasoning={"effort": "high", "summary": "auto"},
        text={"format": schema, "verbosity": "low"},
        store=False,
        user="u",
        service_tier="auto",
        prompt_cache_key="k",
        metadata={"a": "b"},
        chat_template_kwargs={"enable_thinking": False},
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        max_tool_calls=None,
        stream=True,
    )
    assert chat == {
        "model": "m",
        "messages": [USER],
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 3,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "high",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "verbosity": "low",
        "store": False,
        "user": "u",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
    }


TOOL: Json = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": {"type": "object"},
    "strict": True,
}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "custom", "name": "c"}, {"type": "custom", "custom": {"name": "c"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        ),
    ],
)
def test_tools_and_tool_choice(choice: Any, expected: Any) -> None:
    grammar = {
        "type": "custom",
        "name": "c",
        "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
    }
    chat = to_chat(tools=[TOOL, grammar], tool_choice=choice, parallel_tool_calls=False)
    assert chat["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        },
        {
            "type": "custom",
            "custom": {
                "name": "c",
                "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x"}},
            },
        },
    ]
    assert chat["tool_choice"] == expected
    assert chat["parallel_tool_calls"] is False


def test_without_tools_nothing_is_said_of_them() -> None:
    chat = to_chat(tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert chat == {"messages": [USER]}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "mcp"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "file_search"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"input": None}, "input"),
        ({"input": [1]}, r"input\[0\]"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "computer_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"input": [{"role": "assistant", "function_call": {"name": "f"}}]}, "function_call"),
        ({"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "msg_1"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}]}, "f1"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://f"}]}]},
            "file_url",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "grammar"),
        ({"metadata": {"extra_body": "{"}}, "extra_body"),
        ({"metadata": {"audio_path": "a.wav"}}, "audio_path"),
    ],
)
def test_what_chat_cannot_do_is_named(body: Json, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        to_chat(**body)


def test_gym_metadata_takes_effect() -> None:
    chat = to_chat(
        temperature=0.5,
        chat_template_kwargs={"a": 1, "b": 1},
        metadata={
            "extra_body": '{"seed": 1180591620717411303425, "temperature": 1.0}',
            "chat_template_kwargs": '{"b": 2}',
            "audio_data": "data:audio/wav;base64,AA",
            "mine": "kept",
        },
    )
    assert chat == {
        "seed": 2**70 + 1,
        "temperature": 0.5,
        "chat_template_kwargs": {"a": 1, "b": 2},
        "metadata": {"mine": "kept"},
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA"}},
                    {"type": "text", "text": "hi"},
                ],
            }
        ],
    }
    assert "metadata" not in to_chat(metadata={"extra_body": "{}"})


def kinds(response: Json) -> list[str]:
    return [item["type"] for item in response["output"]]


def text_of(response: Json) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part.get("text", "") for part in parts)


def test_answer_is_a_complete_response() -> None:
    request = {"input": "hi", "model": "m", "tools": [TOOL], "temperature": 0.3, "instructions": "x"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{ "x": 1}'}}
    given = chat_answer({"content": "t", "reasoning": "r", "tool_calls": [call]}, "tool_calls")
    given["usage"] = {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    response = translate_answer(given, request, "chat", "responses")
    assert response["created_at"] == 17
    assert isinstance(response["created_at"], int)
    assert (response["status"], response["model"], response["tools"]) == ("completed", "up", [TOOL])
    assert (response["temperature"], response["tool_choice"], response["instructions"]) == (0.3, "auto", "x")
    assert response["error"] is response["incomplete_details"] is None
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }
    reasoning, message, function_call = response["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "r"}]
    assert message["content"] == [{"type": "output_text", "text": "t", "annotations": []}]
    assert (function_call["call_id"], function_call["name"], function_call["arguments"]) == (
        "a",
        "f",
        '{ "x": 1}',
    )


@pytest.mark.parametrize(
    ("message", "expected", "text"),
    [
        ({"content": None}, ["message"], ""),
        ({"content": ""}, ["message"], ""),
        ({}, ["message"], ""),
        ({"content": "<think>a</think>b<think>c</think>"}, ["reasoning", "message"], "b"),
        ({"content": "<think>never closed"}, ["message"], "<think>never closed"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, ["message"], "ab"),
        ({"content": "x", "reasoning_details": [{"text": "r"}]}, ["reasoning", "message"], "x"),
    ],
)
def test_the_text_of_an_answer(message: Json, expected: list[str], text: str) -> None:
    response = answer(message)
    assert kinds(response) == expected
    assert text_of(response) == text


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
        ("stop", "completed", None),
    ],
)
def test_finish_reasons(finish: str, status: str, details: Any) -> None:
    response = answer({"content": "x"}, finish)
    assert (response["status"], response["incomplete_details"]) == (status, details)


def test_refusal_and_custom_call() -> None:
    call = {"id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    response = answer({"content": None, "refusal": "no", "tool_calls": [call]})
    assert response["output"][0]["content"] == [{"type": "refusal", "refusal": "no"}]
    item = response["output"][1]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "sh", "ls")


def test_logprobs_only_for_who_asked() -> None:
    entry = {"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    logprobs = {"content": [entry]}
    asked = {"input": "hi", "include": ["message.output_text.logprobs"]}
    with_them = answer({"content": "x"}, request=asked, logprobs=logprobs)
    assert with_them["output"][0]["content"][0]["logprobs"] == [{**entry, "bytes": [120]}]
    without = answer({"content": "x"}, logprobs=logprobs)
    assert "logprobs" not in without["output"][0]["content"][0]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "choices"),
        ({"choices": []}, "empty"),
        ({"choices": [{"message": None}]}, "message is None"),
        ({"choices": [{"message": {"tool_calls": "x"}}]}, "tool_calls"),
        ({"choices": [{"message": {"role": "assistant", "tool_calls": [{"id": "a"}]}}]}, "tool call"),
        ({"choices": [{"message": {}, "finish_reason": "error", "error": "boom"}]}, "boom"),
        ({"error": {"message": "overloaded"}}, "overloaded"),
        ({"object": "error", "message": "no such model"}, "no such model"),
        (["x"], "JSON"),
    ],
)
def test_what_is_no_answer_is_a_policy_error(given: Any, word: str) -> None:
    with pytest.raises(PolicyError, match=word):
        checked_translation(given, {"input": "hi"}, "chat", "responses")


def test_unknown_direction() -> None:
    with pytest.raises(ConfigError, match="messages"):
        translate_request({"messages": []}, "chat", "messages")


def test_ids_are_texts_and_each_call_has_one() -> None:
    numbered = {"id": 5, "choices": [{"message": {"tool_calls": [{"id": 7}]}}]}
    assert with_text_ids(numbered, "chat") == {
        "id": "5",
        "choices": [{"message": {"tool_calls": [{"id": "7"}]}}],
    }
    assert with_text_ids({"id": 5, "choices": []}, "chat")["id"] == "5"
    calls = [{"id": "a"}, {"id": None}]
    named = with_call_ids({"choices": [{"message": {"role": "assistant", "tool_calls": calls}}]})
    first, second = named["choices"][0]["message"]["tool_calls"]
    assert first["id"] == "a"
    assert second["id"] not in (None, "a")


def test_what_was_asked_for_is_repeated_as_it_was() -> None:
    shape = {"type": "json_schema", "name": "n", "schema": {}, "strict": True}
    assert response_object([], {"text": {"format": shape}})["text"]["format"] == {
        **shape,
        "description": None,
    }


def test_no_logprobs_are_no_logprobs() -> None:
    sent = translate_request({"input": "hi", "top_logprobs": 0}, "responses", "chat")
    assert "logprobs" not in sent


def test_an_image_of_original_detail_has_a_high_one() -> None:
    image = {"type": "input_image", "image_url": "data:x", "detail": "original"}
    sent = translate_request({"input": [{"role": "user", "content": [image]}]}, "responses", "chat")
    assert sent["messages"][0]["content"][0]["image_url"] == {"url": "data:x", "detail": "high"}
