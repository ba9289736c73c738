"""Which recorded turn answers a conversation, in whatever form the conversation comes back."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_replay_recordings import call, output, reasoning, record, recordings, said, user

from gymgate.core.errors import ConfigError, DataError, UnknownConversationError
from gymgate.gateway.dialects import translate_answer
from gymgate.gateway.replay.backend import ReplayBackend
from gymgate.gateway.replay.conversation import blocks_of
from gymgate.gateway.replay.index import KEPT_INDEXES, ReplayIndex, _load, load_index
from gymgate.gateway.replay.recording import Recording, Turn

CLICK = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
SYSTEM = {"role": "system", "content": "be good"}


def index_of(path: Path, *records: Any) -> ReplayIndex:
    return ReplayIndex(recordings(path / "r.jsonl", *records))


def turn(index: ReplayIndex, items: Any, **fields: Any) -> tuple[int, int]:
    match = index.find({"input": items, **fields})
    return match.recording.index, match.turn


SAME: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "a string": ([user("hi")], {"input": "hi"}),
    "instructions": ([SYSTEM, user("hi")], {"instructions": "be good", "input": "hi"}),
    "developer": ([SYSTEM, user("hi")], {"input": [{**SYSTEM, "role": "developer"}, user("hi")]}),
    "parts": ([user("hi")], {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}),
    "messages of one role, joined": ([user("a"), user("b")], {"input": "a\n\nb"}),
    "whitespace": ([user("a  b\n")], {"input": "a b"}),
    "image detail": (
        [{"role": "user", "content": [CLICK]}],
        {"input": [{"role": "user", "content": [{**CLICK, "detail": "low"}]}]},
    ),
    "image by an object": (
        [{"role": "user", "content": [{**CLICK, "image_url": {"url": "u", "detail": "low"}}]}],
        {"input": [{"role": "user", "content": [{**CLICK, "image_url": {"url": "u", "detail": "high"}}]}]},
    ),
    "reasoning dropped": (
        [user("q"), reasoning(), said("a"), user("r")],
        {"input": [user("q"), said("a"), user("r")]},
    ),
    "text and calls in another order": (
        [user("q"), call("1"), said("a"), output("1")],
        {"input": [user("q"), said("a"), call("1"), output("1")]},
    ),
    "other call ids": (
        [user("q"), call("1", "f"), call("2", "g"), output("1", "x"), output("2", "y")],
        {"input": [user("q"), call("8", "f"), call("9", "g"), output("9", "y"), output("8", "x")]},
    ),
    "arguments": (
        [user("q"), call("1", "f", '{"a": 1, "b": 2}'), output("1")],
        {"input": [user("q"), call("1", "f", '{"b":2,"a":1}'), output("1")]},
    ),
    "a turn that only reasons": (
        [user("q"), reasoning(), user("r")],
        {"input": [user("q"), user("r")]},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_same_conversation(tmp_path: Path, case: str) -> None:
    recorded, body = SAME[case]
    match = index_of(tmp_path, record(recorded, [said("answer")])).find(body)
    assert match.kind == "exact"


OTHER: dict[str, tuple[list[Any], ...]] = {
    "text": ([user("a")], [user("b")]),
    "role": ([user("a")], [SYSTEM | {"content": "a"}]),
    "image": (
        [{"role": "user", "content": [CLICK]}],
        [{"role": "user", "content": [CLICK | {"image_url": "data:image/png;base64,BBBB"}]}],
    ),
    **{
        name: ([{"role": "user", "content": [one]}], [{"role": "user", "content": [other]}])
        for name, one, other in (
            (
                "clip",
                {"type": "audio_url", "audio_url": {"url": "a"}},
                {"type": "audio_url", "audio_url": {"url": "b"}},
            ),
            ("video", {"type": "input_video", "video_url": "a"}, {"type": "input_video", "video_url": "b"}),
            ("file", {"type": "input_file", "file_url": "a"}, {"type": "input_file", "file_url": "b"}),
            ("part of another type", {"type": "point", "at": 1}, {"type": "point", "at": 2}),
        )
    },
    "call": (
        [user("q"), call("1", "f", '{"a": 1}'), output("1")],
        [user("q"), call("1", "f", '{"a": 2}'), output("1")],
    ),
    "image of a tool": tuple(
        [user("q"), call("1", "f"), {**output("1"), "output": [CLICK | {"image_url": url}]}] for url in "ab"
    ),
    "tool": ([user("q"), call("1", "f"), output("1")], [user("q"), call("1", "g"), output("1")]),
    "order": ([user("a"), said("x"), user("b")], [user("b"), said("x"), user("a")]),
    "nothing": ([user("a")], []),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_conversation(tmp_path: Path, case: str) -> None:
    recorded, asked = OTHER[case]
    index = index_of(tmp_path, record(recorded, [said("answer")]))
    with pytest.raises(UnknownConversationError, match=r" message \d"):
        index.find({"input": asked})


def test_the_clip_in_metadata_tells_rows_with_the_same_text_apart(tmp_path: Path) -> None:
    clips = [{"metadata": {"audio_data": f"data:audio/wav;base64,{name}"}} for name in "AB"]
    recorded = [record("transcribe", [said("text")]) for _ in clips]
    for line, clip in zip(recorded, clips, strict=True):
        line["responses_create_params"] |= clip
    index = index_of(tmp_path, *recorded)
    assert [turn(index, "transcribe", **clips[n]) for n in (1, 1, 0)] == [(1, 0), (1, 0), (0, 0)]
    with pytest.raises(UnknownConversationError):
        index.find({"input": "transcribe", "metadata": {"audio_data": "C"}})


def test_turns_follow_each_other_and_end(tmp_path: Path) -> None:
    items = [call("1"), output("1"), said("a"), user("more"), said("b")]
    index = index_of(tmp_path, record("q", items))
    asked = [user("q"), *items]
    assert [turn(index, asked[:n]) for n in (1, 3, 5)] == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(UnknownConversationError, match=r"r\.jsonl:1, .* message 6,"):
        index.find({"input": [*asked, user("and now?")]})
    with pytest.raises(UnknownConversationError, match=r"message 5 \(user\): recorded 'more', got 'less'"):
        index.find({"input": [*asked[:4], user("less")]})


def test_a_tool_that_answers_otherwise_matches_loosely(tmp_path: Path) -> None:
    items = [call("1"), output("1", "ok"), said("a")]
    index = index_of(tmp_path, record("q", items), record("q", [call("1"), output("1", "bad"), said("b")]))
    recorded = index.find({"input": [user("q"), call("1"), output("1", "bad")]})
    assert (recorded.recording.index, recorded.turn, recorded.kind) == (1, 1, "exact")
    other = index.find({"input": [user("q"), call("1"), output("1", "new")]})
    assert (other.turn, other.kind) == (1, "loose")


def test_a_miss_reads_one_recording_whatever_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request and the nearest recording; the others were read when the index was made."""
    items = [call("1"), output("1", "ok"), said("a")]
    index = index_of(tmp_path, *(record([user("q"), said(str(n)), user("go on")], items) for n in range(300)))
    read: list[Any] = []

    def counted(items: Any) -> Any:
        read.append(items)
        return blocks_of(items)

    monkeypatch.setattr("gymgate.gateway.replay.index.blocks_of", counted)
    start = [user("q"), said("200"), user("go on")]
    with pytest.raises(UnknownConversationError, match=r"r\.jsonl:201, .* message 4"):
        index.find({"input": [*start, said("else")]})
    assert len(read) == 2
    with pytest.raises(UnknownConversationError, match=r"r\.jsonl:1, .* message 1"):
        index.find({"input": "new"})
    assert len(read) == 4
    assert index.find({"input": [*start, call("1"), output("1", "new")]}).recording.index == 200
    assert len(read) == 6, "the request and the prompt that it resembles"


@given(
    st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=5), min_size=1, max_size=6),
    st.lists(st.sampled_from("abc"), max_size=7),
)
def test_the_nearest_recording_is_the_first_that_agrees_longest(
    recorded: list[list[str]], asked: list[str]
) -> None:
    def talk(words: list[str]) -> list[Any]:
        return [(user if n % 2 == 0 else said)(word) for n, word in enumerate(words)]

    def agree(words: list[str]) -> int:
        return next(
            (n for n, (one, other) in enumerate(zip(words, asked, strict=False)) if one != other),
            min(len(words), len(asked)),
        )

    recordings = [
        Recording("r.jsonl", n + 1, n, {"response": {}}, (Turn(talk(words[:-1]), talk(words)[-1:]),))
        for n, words in enumerate(recorded)
    ]
    best = max(range(len(recorded)), key=lambda n: (agree(recorded[n]), -n))
    with pytest.raises(UnknownConversationError, match=rf"r\.jsonl:{best + 1}, "):
        raise ReplayIndex(recordings)._unknown(blocks_of(talk(asked)))


START, BOARD, NEXT = user("play"), user("board 1"), user("board 2")
LOOSE: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "a tool's output": ([user("q")], [call("1"), said("a"), call("2")], [user("q"), call("1"), output("1")]),
    "an observation before the first turn": ([START], [said("up")], [START, BOARD]),
    "an observation before each turn": (
        [START],
        [said("up"), reasoning(), said("down")],
        [START, BOARD, said("up"), NEXT],
    ),
    "the first of two observations": (
        [START],
        [said("up"), NEXT, said("down")],
        [START, BOARD, said("up"), NEXT],
    ),
    "the end of a message": (
        [START],
        [said("up"), NEXT, said("down")],
        [START, said("up"), user("board 2!")],
    ),
}


@pytest.mark.parametrize("case", LOOSE)
def test_what_the_environment_said_may_be_missing(tmp_path: Path, case: str) -> None:
    given_, items, asked = LOOSE[case]
    index = index_of(tmp_path, record(given_, items))
    match = index.find({"input": asked})
    assert (match.turn, match.kind) == (
        len([item for item in asked if item.get("role") == "assistant" or "name" in item]),
        "loose",
    )


@pytest.mark.parametrize(
    "asked",
    [
        [user("else"), said("up"), NEXT],
        [SYSTEM, START, said("up"), NEXT],
        [user("play!"), said("up"), NEXT],
        [START, said("up"), user("board 3")],
        [START, said("left"), NEXT],
    ],
    ids=["opening", "before the opening", "the opening's text", "a message", "the policy"],
)
def test_what_was_recorded_must_have_been_said(tmp_path: Path, asked: list[Any]) -> None:
    index = index_of(tmp_path, record([START], [said("up"), NEXT, said("down")]))
    with pytest.raises(UnknownConversationError):
        index.find({"input": asked})


def test_a_system_message_that_was_recorded_must_have_been_said(tmp_path: Path) -> None:
    index = index_of(tmp_path, record([START], [said("up"), NEXT, said("left"), SYSTEM, said("down")]))
    asked = [START, said("up"), user("board 2!"), said("left")]
    assert index.find({"input": [*asked, SYSTEM]}).kind == "loose"
    with pytest.raises(UnknownConversationError):
        index.find({"input": [*asked, SYSTEM | {"content": "be quick"}]})


def test_a_text_that_was_recorded_twice_must_have_been_said_twice(tmp_path: Path) -> None:
    index = index_of(tmp_path, record([START], [said("up"), user("go"), said("up"), user("go"), said("end")]))
    with pytest.raises(UnknownConversationError):
        index.find({"input": [START, said("up"), user("go"), said("up")]})


def test_a_recording_without_a_prompt_answers_no_other_conversation(tmp_path: Path) -> None:
    index = index_of(tmp_path, record([], [said("a"), said("b")]))
    with pytest.raises(UnknownConversationError):
        index.find({"input": [user("q")]})


def test_equal_first_calls_take_turns_and_call_ids_lead_on(tmp_path: Path) -> None:
    one = [call("1a"), output("1a"), said("one")]
    two = [call("2a"), output("2a"), said("two")]
    index = index_of(tmp_path, record("q", one), record("q", two))
    assert [turn(index, "q")[0] for _ in range(4)] == [0, 1, 0, 1]
    assert {turn(index, [user("q"), *two[:2]]) for _ in range(3)} == {(1, 1)}
    assert [turn(index, [user("q"), call("x"), output("x")])[0] for _ in range(2)] == [0, 1]


def test_asking_again_after_reasoning_only_is_not_answered_for_ever(tmp_path: Path) -> None:
    index = index_of(tmp_path, record("q", [reasoning()]))
    assert turn(index, "q") == (0, 0)
    with pytest.raises(UnknownConversationError):
        index.find({"input": [user("q"), reasoning()]})


def test_an_index_is_made_once_and_pins(tmp_path: Path) -> None:
    recordings(tmp_path / "r.jsonl", record("q", [said("a")]), record("q", [said("b")]))
    paths = [str(tmp_path / "r.jsonl")]
    assert load_index(paths) is load_index(paths)
    assert {turn(load_index(paths, 1), "q")[0] for _ in range(3)} == {1}
    with pytest.raises(ConfigError, match=r"\b2\b.*r\.jsonl.*\b0 to 1"):
        load_index(paths, 2)
    recordings(tmp_path / "r.jsonl", record("q", [said("changed")]), record("other", []))
    assert len(load_index(paths).recordings[1].steps) == 0


def test_a_pinned_recording_is_read_without_the_others(tmp_path: Path) -> None:
    recordings(tmp_path / "r.jsonl", record("q", [said("a")]))
    (tmp_path / "broken.jsonl").write_text("\n{not json\n" + json.dumps(record("q", [said("b")])) + "\n")
    paths = [str(tmp_path / "r.jsonl"), str(tmp_path / "broken.jsonl")]
    assert load_index(paths, 2).recordings[0].name == "broken.jsonl:3"
    with pytest.raises(DataError, match=r"broken.jsonl:2"):
        load_index(paths, 1)
    with pytest.raises(ConfigError, match=r"no recorded rollout 3 in .*; available: 0 to 2"):
        load_index(paths, 3)


def test_the_indexes_used_last_are_kept(tmp_path: Path) -> None:
    recordings(tmp_path / "r.jsonl", *(record(f"q{n}", [said("a")]) for n in range(2 * KEPT_INDEXES)))
    paths = [str(tmp_path / "r.jsonl")]
    whole = load_index(paths)
    for pin in range(2 * KEPT_INDEXES):
        load_index(paths, pin)
        assert load_index(paths) is whole, "in use all along"
    assert _load.cache_info().currsize <= KEPT_INDEXES


def test_rotation_is_even_under_threads(tmp_path: Path) -> None:
    index = index_of(tmp_path, *(record("q", [said(str(n))]) for n in range(4)))
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.extend(turn(index, "q")[0] for _ in range(100)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen.count(n) for n in range(4)] == [100] * 4


async def test_answers_are_complete_responses(tmp_path: Path) -> None:
    items = [{"role": "assistant", "content": "plain"}, call("1", "f", "{}")]
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5, "output_tokens_details": None}
    one = record("q", items)
    one["response"] |= {"usage": usage, "incomplete_details": {"reason": "max_output_tokens"}}
    recordings(tmp_path / "r.jsonl", one)
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    backend = ReplayBackend([tmp_path / "r.jsonl"])
    answer = await backend.call({"input": "q", "tools": tools, "tool_choice": "required", "model": "asked"})
    body = answer.body
    assert (body["id"], body["created_at"], body["model"]) == ("resp_1", 7, "m")
    assert body["tools"] == [{**tools[0], "description": None, "strict": None}]
    assert (body["tool_choice"], body["object"]) == ("required", "response")
    assert body["output"][0]["content"] == [{"annotations": [], "type": "output_text", "text": "plain"}]
    assert {item["status"] for item in body["output"]} == {"completed"}
    assert all(item["id"] for item in body["output"])
    assert body["usage"]["total_tokens"] == 5
    usage = translate_answer(body, {}, "responses", "responses")["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer.details == {"recording": "r.jsonl:1", "index": 0, "turn": 0, "turns": 1, "match": "exact"}


async def test_usage_of_several_calls_is_not_given_to_one(tmp_path: Path) -> None:
    several = record("q", [call("1"), output("1"), said("a")])
    several["response"]["usage"] = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    recordings(tmp_path / "r.jsonl", several)
    backend = ReplayBackend([tmp_path / "r.jsonl"])
    first = (await backend.call({"input": "q"})).body
    last = await backend.call({"input": [user("q"), call("1"), output("1", "other")]})
    assert (first["usage"], last.body["usage"]) == (None, None)
    assert (first["id"] != "resp_1", last.body["id"]) == (True, "resp_1")
    assert last.details["match"] == "loose"


async def test_only_the_last_call_of_a_rollout_is_cut_off(tmp_path: Path) -> None:
    """And what an item was recorded with stays: ids of calls, which tool outputs name, and its status."""
    cut = {**said("a"), "status": "incomplete"}
    several = record("q", [call("1"), output("1"), cut])
    several["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    recordings(tmp_path / "r.jsonl", several)
    backend = ReplayBackend([tmp_path / "r.jsonl"])
    first = await backend.call({"input": "q"})
    last = await backend.call({"input": [user("q"), call("1"), output("1")]})
    assert [answer.body["status"] for answer in (first, last)] == ["completed", "incomplete"]
    assert first.body["output"][0]["call_id"] == "1"
    assert last.body["output"][0]["status"] == "incomplete"
    assert [answer.details["turns"] for answer in (first, last)] == [2, 2]
