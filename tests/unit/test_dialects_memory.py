"""An answer that an agent sends back reaches its endpoint exactly as the endpoint gave it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gymgate.core import codec
from gymgate.core.errors import ConfigError
from gymgate.gateway.conversations import Conversations
from gymgate.gateway.dialects import ConversationMemory, translate_answer, translate_request
from gymgate.gateway.dialects.reading import canonical_json

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}


def call(call_id: str, arguments: str = '{"x": 1}') -> Json:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def said(content: str | None, **fields: Any) -> Json:
    return {"role": "assistant", "content": content, **fields}


def output(call_id: str) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": f"out {call_id}"}


def tool(call_id: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": f"out {call_id}"}


class Rollout:
    """An agent that speaks Responses, in front of an endpoint that speaks chat-completions."""

    def __init__(self) -> None:
        self.memory = ConversationMemory()

    def hear(self, message: Json) -> list[Json]:
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        response = translate_answer(answer, {"input": "hi"}, "chat", "responses", self.memory)
        return copy.deepcopy(list(response["output"]))

    def send(self, *items: Json) -> list[Json]:
        body = translate_request({"input": list(items)}, "responses", "chat", self.memory)
        return list(body["messages"])


FIRST = said(
    None,
    refusal=None,
    reasoning_content="why",
    annotations=[],
    tool_calls=[call("a", '{ "x":1 }'), call("b")],
)
LAST = said("done", reasoning_content="so", audio=None)


def validated(item: Json) -> Json:
    """As an agent's own models write it: ids dropped, nulls and statuses added, arguments formatted anew."""
    item = {name: value for name, value in item.items() if name != "id"}
    if item["type"] == "function_call":
        return {**item, "arguments": '{"x":   1}', "status": None, "namespace": None}
    if item["type"] == "reasoning":
        return {**item, "encrypted_content": None, "content": None, "status": "completed"}
    content = [{**part, "logprobs": None} for part in item["content"]]
    return {**item, "status": "incomplete", "phase": None, "content": content}


@pytest.mark.parametrize("change", [copy.deepcopy, validated])
def test_turns_come_back_as_they_were(change: Any) -> None:
    rollout = Rollout()
    first = [change(item) for item in rollout.hear(FIRST)]
    last = [change(item) for item in rollout.hear(LAST)]
    messages = rollout.send(USER, *first, output("a"), output("b"), *last, USER)
    assert messages == [USER, FIRST, tool("a"), tool("b"), LAST, USER]


def test_outputs_between_the_calls_of_one_turn() -> None:
    rollout = Rollout()
    reasoning, first, second = rollout.hear(FIRST)
    messages = rollout.send(USER, reasoning, first, output("a"), second, output("b"))
    assert messages == [USER, FIRST, tool("a"), tool("b")]


def test_answers_without_a_user_between_stay_apart() -> None:
    rollout = Rollout()
    one, two = said("one"), said("two", tool_calls=[call("a")])
    items = [*rollout.hear(one), *rollout.hear(two), output("a")]
    assert rollout.send(USER, *items) == [USER, one, two, tool("a")]


def test_the_longest_run_wins() -> None:
    rollout = Rollout()
    short, long = said("x"), said("x", tool_calls=[call("a")])
    rollout.hear(short)
    items = rollout.hear(long)
    assert rollout.send(USER, *items, output("a")) == [USER, long, tool("a")]
    assert rollout.send(USER, items[0]) == [USER, short]


def test_calls_are_told_apart_by_their_ids_and_names() -> None:
    """Whatever became of the ids of the items."""
    rollout = Rollout()
    answers = [said(None, tool_calls=[call(call_id)]) for call_id in "ab"]
    items = [{**rollout.hear(answer)[0], "id": None} for answer in answers]
    sent = rollout.send(USER, items[0], output("a"), items[1], output("b"))
    assert sent == [USER, answers[0], tool("a"), answers[1], tool("b")]


def test_an_answer_that_the_user_broke_off_is_two() -> None:
    rollout = Rollout()
    text, calling = rollout.hear(said("x", tool_calls=[call("a")]))
    sent = rollout.send(USER, text, USER, calling, output("a"))
    assert sent == [USER, said("x"), USER, said(None, tool_calls=[call("a")]), tool("a")]


def test_an_answer_that_lost_its_reasoning_goes_back_without_it() -> None:
    memory = ConversationMemory()
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "why"}],
    }
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    answer = {"status": "completed", "output": [reasoning, message]}
    heard = translate_answer(answer, {"messages": [USER]}, "responses", "chat", memory)["choices"][0][
        "message"
    ]
    for kept, kinds in ((heard, ["reasoning", "message"]), (said("x"), ["message"])):
        sent = translate_request({"messages": [USER, kept, USER]}, "chat", "responses", memory)["input"]
        assert [item.get("type", "message") for item in sent[1:-1]] == kinds


def test_ids_tell_apart_what_reads_the_same() -> None:
    rollout = Rollout()
    null, empty = said(None), said("")
    first, second = rollout.hear(null), rollout.hear(empty)
    assert rollout.send(USER, *first, USER, *second) == [USER, null, USER, empty]


@pytest.mark.parametrize(
    ("message", "edit", "expected"),
    [
        (FIRST, lambda items: items[1:], said(None, tool_calls=[call("a", '{ "x":1 }'), call("b")])),
        (
            said("text", reasoning="why"),
            lambda items: [items[0], {**items[1], "content": [{"type": "output_text", "text": "edited"}]}],
            said("edited", reasoning="why"),
        ),
        (
            said("text", reasoning_content="why", reasoning="why"),
            lambda items: [items[0], {**items[1], "content": [{"type": "output_text", "text": "edited"}]}],
            said("edited", reasoning_content="why", reasoning="why"),
        ),
        (
            said("<think>why</think>text"),
            lambda items: [items[0], {**items[1], "content": [{"type": "output_text", "text": "edited"}]}],
            said("<think>why</think>edited"),
        ),
        (
            said(None, tool_calls=[call("a")]),
            lambda items: [{**items[0], "arguments": '{"x": 2}'}],
            said(None, tool_calls=[call("a", '{"x": 2}')]),
        ),
    ],
)
def test_what_was_edited_is_translated_from_what_was_sent(message: Json, edit: Any, expected: Json) -> None:
    """Reasoning goes back the way this endpoint gave it."""
    rollout = Rollout()
    items = edit(rollout.hear(message))
    assert rollout.send(USER, *items) == [USER, expected]


def test_think_tags_come_back_in_the_content() -> None:
    rollout = Rollout()
    message = said("<think>a</think>\n\nb")
    items = rollout.hear(message)
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert rollout.send(USER, *items) == [USER, message]


def test_a_call_without_id_gets_one_that_stays() -> None:
    rollout = Rollout()
    (item,) = rollout.hear(said(None, tool_calls=[{**call("a"), "id": None}]))
    message, result = rollout.send(USER, item, output(item["call_id"]))[1:]
    assert message["tool_calls"][0]["id"] == item["call_id"] == result["tool_call_id"]


def test_assumed_reasoning_style_stays() -> None:
    """Reasoning that a row brings along is written the same way in every call, whatever the endpoint shows later."""
    rollout = Rollout()
    given = {"type": "reasoning", "id": "rs_0", "summary": [{"type": "summary_text", "text": "given"}]}
    history = (USER, given, {"role": "assistant", "content": "x"}, USER)
    before = rollout.send(*history)
    items = rollout.hear(said("y", reasoning="r"))
    assert rollout.send(*history, *items)[: len(before)] == before
    assert before[1] == said("x", reasoning_content="given", reasoning="given")


def test_memories_are_apart_and_nothing_is_needed_of_them() -> None:
    rollout, other = Rollout(), Rollout()
    items = rollout.hear(FIRST)
    sent = other.send(USER, *items)[1]
    assert sent != FIRST
    assert [entry["id"] for entry in sent["tool_calls"]] == ["a", "b"]


ITEMS: list[Json] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "opaque", "status": None},
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "t", "annotations": [], "logprobs": []}],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "a",
        "name": "f",
        "arguments": '{"x":1}',
        "status": "completed",
    },
]


def test_items_come_back_as_items_to_a_chat_agent() -> None:
    memory = ConversationMemory()
    answer = {"status": "completed", "output": ITEMS}
    completion = translate_answer(answer, {"messages": [USER]}, "responses", "chat", memory)
    message = completion["choices"][0]["message"]
    kept = {name: message[name] for name in ("role", "content", "tool_calls")}
    body = translate_request({"messages": [USER, kept, tool("a")]}, "chat", "responses", memory)
    assert body["input"] == [
        {"type": "message", "role": "user", "content": "hi"},
        *ITEMS,
        {"type": "function_call_output", "call_id": "a", "output": "out a"},
    ]
    edited = translate_request({"messages": [{**kept, "content": "other"}]}, "chat", "responses", memory)
    assert [item["type"] for item in edited["input"]] == ["message", "function_call"]


def test_long_integers_that_differ_do_so_in_what_is_compared() -> None:
    texts = [f'{{"x": {2**70 + number}}}' for number in (1, 2)]
    assert canonical_json(texts[0]) != canonical_json(texts[1])


def test_history_in_the_shape_of_chat_messages() -> None:
    rollout = Rollout()
    rollout.hear(FIRST)
    rollout.hear(LAST)
    sent = rollout.send(USER, dict(FIRST), tool("a"), tool("b"), said("done", reasoning="so"))
    assert sent == [USER, FIRST, tool("a"), tool("b"), LAST]


@pytest.mark.parametrize("typed", [True, False])
def test_items_that_are_only_referred_to(typed: bool) -> None:
    """Vercel's AI SDK sends its own answers' items by id."""
    rollout = Rollout()
    items = rollout.hear(FIRST)
    kind = {"type": "item_reference"} if typed else {}
    references = [{**kind, "id": item["id"]} for item in items]
    assert rollout.send(USER, *references, output("a"), output("b")) == [USER, FIRST, tool("a"), tool("b")]
    part = rollout.send(USER, *references[1:2], output("a"))
    assert [call["id"] for call in part[1]["tool_calls"]] == ["a"]


CHAT_ANSWER = said("let me see", reasoning_content="why", tool_calls=[call("a", '{ "x":1 }'), call("b")])
RESPONSES_ANSWER: list[Json] = [
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "why"}]},
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "a", "name": "f", "input": "1"},
    {"type": "function_call", "id": "fc_1", "call_id": "b", "name": "f", "arguments": '{ "x":1 }'},
]


def answer_of(endpoint: str, turn: int) -> Json:
    """An endpoint's answer with two tool calls; every third has text alone."""
    if endpoint == "chat":
        message = said(f"done {turn}") if turn % 3 == 2 else CHAT_ANSWER
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": f"done {turn}"}],
    }
    return {"output": [text] if turn % 3 == 2 else RESPONSES_ANSWER}


def next_items(agent: str, answer: Json, turn: int) -> list[Json]:
    """What an agent adds to its history: the answer, and its tools' outputs or the user's next message."""
    if agent == "responses":
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        return [*answer["output"], *(output(item["call_id"]) for item in calls)] + [USER] * (not calls)
    if agent == "chat":
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        return [message, *(tool(each["id"]) for each in calls)] + [USER] * (not calls)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"out {turn}"}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": results or "go on"},
    ]


@pytest.mark.parametrize(
    ("agent", "endpoint"),
    [("responses", "chat"), ("chat", "responses"), ("messages", "chat"), ("messages", "responses")],
)
def test_a_translation_goes_on_where_the_earlier_one_ended(agent: Any, endpoint: Any) -> None:
    """It is what a translation of the whole request is, and what the earlier request had is translated once."""
    reader, memory, other = Conversations(), ConversationMemory(), ConversationMemory()
    field, sent_as = (
        "input" if agent == "responses" else "messages",
        "messages" if endpoint == "chat" else "input",
    )
    system = {"role": "system", "content": "be brief"}
    history = [USER] if agent == "messages" else [system, USER]
    extra = {"responses": {"instructions": "now"}, "messages": {"system": "now"}, "chat": {}}[agent]
    earlier: Any = None
    for turn in range(8):
        raw = codec.dumps({"model": "m", field: history, **extra})
        body = reader.parse(raw, agent)[0]
        sent = translate_request(body, agent, endpoint, memory)
        whole = translate_request(codec.loads(raw), agent, endpoint, other)
        assert codec.dumps(sent) == codec.dumps(whole)
        assert sent[sent_as].extends(earlier) == (turn > 0)
        earlier = sent[sent_as]
        answer = answer_of(endpoint, turn)
        heard = translate_answer(answer, body, endpoint, agent, memory)
        translate_answer(answer, body, endpoint, agent, other)
        history = [*history, *next_items(agent, heard, turn)]
    assert len(history) > 16


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_a_translation_goes_on_although_marks_for_the_cache_move(endpoint: Any) -> None:
    reader, memory, other = Conversations(), ConversationMemory(), ConversationMemory()
    sent_as = "messages" if endpoint == "chat" else "input"
    history: list[Json] = [USER]
    earlier: Any = []
    for turn in range(8):
        last = [at for at, message in enumerate(history) if message["role"] == "user"][-2:]
        messages = [
            {**message, "content": with_mark(message["content"])} if at in last else message
            for at, message in enumerate(history)
        ]
        raw = codec.dumps({"messages": messages, "system": "now"})
        body = reader.parse(raw, "messages")[0]
        sent = translate_request(body, "messages", endpoint, memory)
        assert codec.dumps(sent) == codec.dumps(
            translate_request(codec.loads(raw), "messages", endpoint, other)
        )
        if turn > 2:
            assert sent[sent_as].extends(earlier)
            assert sent[sent_as].shared == len(earlier)
        earlier = sent[sent_as]
        answer = answer_of(endpoint, turn)
        heard = translate_answer(answer, body, endpoint, "messages", memory)
        translate_answer(answer, body, endpoint, "messages", other)
        history = [*history, *next_items("messages", heard, turn)]


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_a_message_that_an_agent_sends_otherwise_is_translated_anew(endpoint: Any) -> None:
    """As where an agent clears what a tool answered, to save context."""
    reader, memory = Conversations(), ConversationMemory()
    more = [{"role": "assistant", "content": "so"}, {"role": "user", "content": "go on"}]
    history = [USER, *more, *more, *more, more[0], {"role": "user", "content": "long " * 50}]
    for messages in (
        history,
        [*history, *more],
        [*history[:-1], {**history[-1], "content": "cleared"}, *more, *more],
    ):
        raw = codec.dumps({"messages": messages})
        sent = translate_request(reader.parse(raw, "messages")[0], "messages", endpoint, memory)
        assert codec.dumps(sent) == codec.dumps(translate_request(codec.loads(raw), "messages", endpoint))
    assert endpoint == "responses" or sent["messages"].shared == 8


def with_mark(content: Any) -> list[Json]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]


def test_a_turn_that_goes_on_is_translated_as_one() -> None:
    """A request may end with what the assistant is to go on from, or with system messages."""
    reader, memory = Conversations(), ConversationMemory()
    system, start = {"role": "system", "content": "a"}, said("start")
    more = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    for items in ([system], [system, system, USER, start], [system, system, USER, start, more, output("a")]):
        body = reader.parse(codec.dumps({"input": items, "instructions": "now"}), "responses")[0]
        sent = translate_request(body, "responses", "chat", memory)["messages"]
        assert (
            sent
            == translate_request({"input": items, "instructions": "now"}, "responses", "chat")["messages"]
        )
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("agent", "endpoint"), [("responses", "chat"), ("chat", "responses"), ("messages", "chat")]
)
def test_a_malformed_item_is_named_by_its_place_in_the_request(agent: Any, endpoint: Any) -> None:
    reader, memory = Conversations(), ConversationMemory()
    field = "input" if agent == "responses" else "messages"
    for items in ([USER], [USER, USER, 7]):
        body = reader.parse(codec.dumps({field: items}), agent)[0]
        if len(items) == 1:
            translate_request(body, agent, endpoint, memory)
    with pytest.raises(ConfigError, match=rf"{field}\[2\]"):
        translate_request(body, agent, endpoint, memory)


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("agent", ["chat", "messages", "responses"])
def test_answers_that_an_agent_cannot_tell_apart_go_back_as_each_was(agent: Any, is_edited: bool) -> None:
    """Two conversations of a rollout, or two turns of one, whose answers differ in what the agent does not get."""
    endpoint: Any = "chat" if agent == "responses" else "responses"
    field, sent_as = ("input", "messages") if agent == "responses" else ("messages", "input")
    memory = ConversationMemory()
    asked = [{"role": "user", "content": text} for text in ("first", "second")]
    answers: list[Json] = []
    heard: list[list[Json]] = []
    for number, question in enumerate(asked):
        if endpoint == "chat":
            message = said("ok", annotations=[{"n": number}])
            answer: Json = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
            answers.append(message)
        else:
            thought = {
                "type": "reasoning",
                "id": f"rs_{number}",
                "summary": [],
                "encrypted_content": f"{number}",
            }
            text = {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "ok"}],
            }
            answer = {"status": "completed", "output": [thought, text]}
            answers.append(thought)
        got = translate_answer(answer, {field: [question]}, endpoint, agent, memory)
        heard.append(without_ids(next_items(agent, got, number))[:1])
    if is_edited:  # two turns of one conversation, whose start was edited
        history = [{"role": "user", "content": "other"}, *asked[:1], *heard[0], *asked[1:], *heard[1], USER]
        sent = translate_request({field: history}, agent, endpoint, memory)[sent_as]
        assert [item for item in sent if item in answers] == answers
    for question, answer, items in zip(asked, answers, heard, strict=True):
        marked = {**question, "content": with_mark(question["content"])} if agent == "messages" else question
        sent = translate_request({field: [marked, *items, USER]}, agent, endpoint, memory)[sent_as]
        assert sent[1] == answer


def without_ids(items: list[Json]) -> list[Json]:
    """As agents do that validate what they get."""
    return [{name: value for name, value in item.items() if name != "id"} for item in items]
