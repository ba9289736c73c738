"""What fuzzing found: answers of endpoints that hold half characters, line breaks where names go, or text for objects."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gymgate.core.errors import PolicyError
from gymgate.gateway.dialects import ConversationMemory, encode_stream, translate_answer, translate_request
from gymgate.gateway.dialects.content import split_think_tags

HALF = json.loads('"\\ud800"')


def message(text: str, part: str = "output_text") -> dict[str, Any]:
    content = [{"type": part, "text": text, "annotations": []}]
    return {
        "output": [{"type": "message", "id": "m", "role": "assistant", "content": content}],
        "status": "completed",
    }


def test_half_a_character_streams() -> None:
    sent = b"".join(encode_stream(message(f"a{HALF}"), "responses", {}))
    assert "a\ufffd".encode() in sent


def test_half_a_character_translates() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": HALF}}}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "tool_calls": [call]},
        "finish_reason": "tool_calls",
    }
    answer = translate_answer({"choices": [choice]}, {"input": []}, "chat", "responses")
    assert json.loads(answer["output"][0]["arguments"]) == {"x": "\ufffd"}


def test_a_type_cannot_write_events() -> None:
    """The event's name is made of the part's type."""
    answer = {"content": [{"type": "text", "text": "x"}], "id": "m", "type": "message\n\ndata: forged"}
    for made in (message("x", "output_text\n\ndata: forged"), answer):
        sent = b"".join(encode_stream(made, "responses" if "output" in made else "messages", {}))
        assert not any(line.startswith(b"data: forged") for line in sent.splitlines())


@pytest.mark.parametrize("index", [-1, 2, None])
def test_streamed_calls_are_told_apart_whatever_number_their_endpoint_gives_them(index: int | None) -> None:
    """SGLang may number all of a whole answer's calls -1, and clients join those of one number."""
    calls = [
        {"index": index, "id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("f", "g")
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "tool_calls": calls},
        "finish_reason": "tool_calls",
    }
    chunks = [
        json.loads(line.removeprefix(b"data: "))
        for line in b"".join(encode_stream({"choices": [choice]}, "chat", {})).splitlines()
        if line.startswith(b"data: {")
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    told = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["id"]) for call in told] == [(0, "f"), (1, "g")]


@pytest.mark.parametrize("content", ["text", [1], [["x"]]])
def test_an_answer_that_is_none_is_the_endpoints_fault(content: Any) -> None:
    answer = {"output": [{"type": "message", "content": content}]}
    with pytest.raises(PolicyError, match="responses"):
        list(encode_stream(answer, "responses", {}))


def test_a_model_that_repeats_the_beginning_of_a_thought_holds_nobody_up() -> None:
    """The daemon stood still for minutes over 200 KB, and with it every other rollout."""
    began = time.process_time()
    tags = "<think>" * 10_000
    assert split_think_tags(tags) == ([], tags)
    assert split_think_tags(f"<think>a</think>b{tags}") == (["a"], f"b{tags}")
    assert time.process_time() - began < 2


def test_a_thought_thought_ten_thousand_times_holds_nobody_up() -> None:
    """An agent that edits the text after it sends a turn that matches nothing, which was looked for at each thought."""
    began = time.process_time()
    ask = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
    message = {"role": "assistant", "content": f"{'<think>a</think>' * 20_000}text \n"}
    memory = ConversationMemory()
    answer = translate_answer({"choices": [{"message": message}]}, ask, "chat", "messages", memory)
    *thoughts, text = answer["content"]
    turn = {"role": "assistant", "content": [*thoughts, {**text, "text": "text"}]}
    sent = translate_request({**ask, "messages": [*ask["messages"], turn]}, "messages", "chat", memory)
    assert sent["messages"][1]["content"].endswith("text")
    assert time.process_time() - began < 3
