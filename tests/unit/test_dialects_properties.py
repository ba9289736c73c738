"""Round trips over generated conversations: whatever both dialects can say survives being said in the other."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import orjson
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gymgate.core.config import Dialect
from gymgate.core.errors import ConfigError, PolicyError
from gymgate.gateway.dialects import (
    ConversationMemory,
    finish_reason_of,
    token_data_of,
    translate_answer,
    translate_request,
    usage_of,
)
from gymgate.gateway.dialects.memory import message_fingerprint
from gymgate.gateway.dialects.reading import fault_of
from support.translation import checked_translation

Json = dict[str, Any]
FAST = settings(max_examples=60)

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda t: "<think>" not in t
)
arguments = st.dictionaries(st.sampled_from("xyz"), st.integers(-9, 9) | texts, max_size=2)
images = st.builds(
    lambda data, detail: {
        "type": "input_image",
        "image_url": f"data:image/png;base64,{data}",
        "detail": detail,
    },
    st.sampled_from(["AA", "BB"]),
    st.sampled_from(["low", "high", "auto"]),
)
parts = st.lists(
    st.builds(lambda text: {"type": "input_text", "text": text}, texts) | images, min_size=1, max_size=3
)
prompts = st.builds(
    lambda role, content: {"type": "message", "role": role, "content": content},
    st.sampled_from(["user", "system", "developer"]),
    texts | parts,
)


@st.composite
def messages(draw: st.DrawFn) -> Json:
    """An assistant's chat message, as engines write them."""
    calls = draw(st.lists(st.tuples(st.uuids(), st.sampled_from("fg"), arguments), max_size=3))
    message: Json = {"role": "assistant", "content": draw(st.none() | st.just("") | texts)}
    if draw(st.booleans()):
        message[draw(st.sampled_from(["reasoning", "reasoning_content"]))] = draw(texts)
    if draw(st.booleans()):
        message["refusal"] = draw(st.none() | texts)
    if calls or draw(st.booleans()):
        message["tool_calls"] = [
            {
                "id": str(i),
                "type": "function",
                "function": {"name": name, "arguments": orjson.dumps(given).decode()},
            }
            for i, name, given in calls
        ]
    return message


turns = st.lists(st.tuples(messages(), st.booleans()), min_size=1, max_size=4)
"""Answers, and whether a user speaks after each."""


def ids_of(message: Json) -> list[str]:
    return [str(call["id"]) for call in message.get("tool_calls") or []]


def answer_of(message: Json) -> Json:
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


@FAST
@given(st.lists(prompts, min_size=1, max_size=3), turns, st.booleans())
def test_every_answer_extends_the_prompt_before_it(opening: list[Json], said: Any, keep_ids: bool) -> None:
    """responses -> chat: each call's messages begin with the previous call's and the answer to it."""
    # Without item ids, answers that read the same cannot be told apart (content null or "").
    assume(keep_ids or len({message_fingerprint(message) for message, _ in said}) == len(said))
    memory = ConversationMemory()
    items = copy.deepcopy(opening)
    expected: list[Json] = []
    for message, user_follows in said:
        sent = translate_request({"input": items}, "responses", "chat", memory)["messages"]
        if expected:
            assert sent[: len(expected)] == expected
        response = translate_answer(answer_of(message), {"input": items}, "chat", "responses", memory)
        expected = [*sent, message]
        heard = copy.deepcopy(response["output"])
        items += heard if keep_ids else [{k: v for k, v in item.items() if k != "id"} for item in heard]
        items += [{"type": "function_call_output", "call_id": i, "output": "ok"} for i in ids_of(message)]
        if user_follows:
            items.append({"role": "user", "content": "go on"})


@FAST
@given(prompts, messages())
def test_request_there_and_back(prompt: Json, message: Json) -> None:
    """responses -> chat -> responses, without a memory."""
    heard = translate_answer(answer_of(message), {"input": "hi"}, "chat", "responses")["output"]
    heard = [item for item in heard if item["type"] != "message" or any(map(part_text, item["content"]))]
    outputs = [{"type": "function_call_output", "call_id": i, "output": "ok"} for i in ids_of(message)]
    body = {
        "model": "m",
        "input": [prompt, *heard, *outputs],
        "temperature": 0.5,
        "max_output_tokens": 3,
        "reasoning": {"effort": "low"},
        "text": {
            "format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True},
            "verbosity": "low",
        },
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
    }
    back = translate_request(translate_request(body, "responses", "chat"), "chat", "responses")
    assert [facts(item) for item in back.pop("input")] == [facts(item) for item in body.pop("input")]
    assert back == body


@FAST
@given(messages())
def test_answer_there_and_back(message: Json) -> None:
    """chat -> responses -> chat: what the model said is the same, and so is how it stopped."""
    response = translate_answer(answer_of(message), {"input": "hi"}, "chat", "responses")
    back = translate_answer(response, {"messages": []}, "responses", "chat")["choices"][0]
    again = back["message"]
    for name in ("content", "refusal", "tool_calls"):
        assert (again.get(name) or None) == (message.get(name) or None)
    assert again.get("reasoning_content") == (message.get("reasoning_content") or message.get("reasoning"))
    assert back["finish_reason"] == ("tool_calls" if ids_of(message) else "stop")


def part_text(part: Json) -> str:
    return str(part.get("text") or part.get("refusal") or "")


def facts(item: Json) -> Any:
    """An item without what a request may leave to its endpoint: ids, statuses, how text is cut into parts."""
    if item["type"] == "message" and item["role"] == "assistant":
        content = item["content"]
        return "".join(map(part_text, content)) if isinstance(content, list) else content
    if item.get("role") == "developer":  # chat endpoints get it as system
        item = {**item, "role": "system"}
    return {name: value for name, value in item.items() if name not in ("id", "status")}


names = st.sampled_from(
    [
        *("type", "role", "content", "text", "input", "output", "choices"),
        *("message", "tool_calls", "function", "id", "call_id", "name", "arguments"),
        *("messages", "tools", "tool_choice", "metadata", "reasoning", "include", "usage"),
        *("logprobs", "status", "summary", "custom", "finish_reason", "system", "source"),
    ]
)
scraps = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["", "x", "message", "reasoning", "function_call"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=12,
)
bodies = st.dictionaries(names, scraps, max_size=6)
dialects = st.sampled_from(["responses", "chat", "messages"])


@settings(max_examples=120)
@given(bodies, dialects, dialects)
def test_nonsense_is_refused_with_one_of_our_errors(body: Json, source: Dialect, target: Dialect) -> None:
    """What is taken is whole, and changes nothing; what is only read for the record is read as what it stands for."""
    memory, before = ConversationMemory(), copy.deepcopy(body)
    with contextlib.suppress(ConfigError):
        request = translate_request(body, source, target, memory)
        assert json.loads(json.dumps(request)) == request
        assert source == target or isinstance(request["input" if target == "responses" else "messages"], list)
    with contextlib.suppress(ConfigError if source == "messages" else PolicyError):
        answer = checked_translation(body, {}, source, target, memory)
        assert json.loads(json.dumps(answer)) == answer
        assert source == target or fault_of(answer, target) is None
    for dialect in (source, target):
        counts = usage_of(body, dialect)
        assert all(count is None or type(count) is int for count in counts.__dict__.values())
        assert isinstance(finish_reason_of(body, dialect), str | None)
        for numbers, kind in zip(token_data_of(body, dialect), (int, int, float), strict=True):
            assert numbers is None or (numbers and {type(number) for number in numbers} == {kind})
    assert body == before
