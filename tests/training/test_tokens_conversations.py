"""Random conversations with tools and reasoning through the real renderers of four model families."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("renderers", reason="needs the renderers package: see docs/training.md")
pytest.importorskip("transformers", reason="needs transformers: see docs/training.md")

from hypothesis import given, settings
from hypothesis import strategies as st

from gymgate.tokens import TokenPolicy, assemble, prefix_misses
from gymgate.tokens.engines import CallableEngine, Sample
from support.conversations import (
    CONFIGS,
    TOOLS,
    Played,
    Story,
    Turn,
    drifted,
    plain_prompts,
    play,
    renderer,
    sampled_ids,
    tokenizer,
)

WORDS = st.sampled_from(
    [
        *(
            "the",
            "calendar",
            " found",
            "search",
            "no such",
            "again\n\n",
            "42",
            "3.14",
            '{"a": 1}',
            "\tx = y",
            "…",
        ),
        *(
            "naïve",
            "数学",
            "🙂",
            "l'été",
            "http://a.b/c?d=e",
            "`code`",
            "**bold**",
            "  two  spaces",
            "\\n",
            "&amp;",
        ),
    ]
)
TEXT = st.lists(WORDS, max_size=6).map(" ".join)
SAID = st.lists(WORDS, min_size=1, max_size=6).map(" ".join).map(str.strip)
CALLS = st.lists(st.tuples(st.sampled_from(["search", "update"]), SAID, st.integers(0, 99)), max_size=2).map(
    tuple
)
TURNS = st.builds(
    Turn,
    reasoning=TEXT,
    content=TEXT,
    calls=CALLS,
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    reply=SAID,
    cut=st.sampled_from([False, False, False, True]),
)
STORIES = st.builds(
    Story,
    renderer=st.sampled_from(sorted(CONFIGS)),
    retention=st.sampled_from([None, "all"]),
    system=st.none() | SAID,
    user=SAID,
    turns=st.lists(TURNS, min_size=1, max_size=5).map(tuple),
)
BOUNDED = settings(max_examples=60, derandomize=True)

pytestmark = pytest.mark.timeout(300)


@BOUNDED
@given(STORIES)
def test_every_prompt_extends_the_exact_ids_before_it(story: Story) -> None:
    """Over users' messages too, where reasoning is retained; else a user's message starts a segment, and nothing else does."""
    played = asyncio.run(play(story))
    turns = played.conversation.turns
    assert [list(turn.completion_ids) for turn in turns] == played.sampled
    for before, after, request in zip(turns, turns[1:], played.requests[1:], strict=False):
        seen = [*before.prompt_ids, *before.completion_ids]
        if story.retention == "all" or request[-1]["role"] == "tool":
            assert list(after.prompt_ids[: len(seen)]) == seen
    users = sum(request[-1]["role"] == "user" for request in played.requests[1:])
    segments = played.conversation.segments
    assert len(segments) <= 1 + (0 if story.retention == "all" else users)
    assert played.conversation.prefix_misses == len(segments) - 1


def test_tools_are_shown_as_chat_templates_show_them() -> None:
    """Qwen's templates write each tool whole, in OpenAI's envelope; a server's chat endpoint then gives the same prompt."""
    for family in ("qwen3", "qwen3.5"):
        policy = TokenPolicy(CallableEngine(lambda ids, sampling: Sample([], [], "stop")), renderer(family))
        prompt = tokenizer().decode(policy.render([{"role": "user", "content": "begin"}], TOOLS))
        for tool in TOOLS:
            assert f"\n{json.dumps(tool)}\n" in prompt


@BOUNDED
@given(STORIES)
def test_masks_add_up_and_cover_exactly_what_was_sampled(story: Story) -> None:
    played = asyncio.run(play(story))
    trained = []
    for row in played.conversation.segments:
        assert len(row.mask) == len(row.completion_ids) == len(row.logprobs or [])
        assert row.policy_version == (1, 1)
        trained += [
            (token, value)
            for token, value, mask in zip(row.completion_ids, row.logprobs or [], row.mask, strict=True)
            if mask
        ]
        assert all(
            (value is None) != bool(mask) for value, mask in zip(row.logprobs or [], row.mask, strict=True)
        )
    sampled = [
        (token, logprob)
        for turn in played.conversation.turns
        for token, logprob in zip(turn.completion_ids, turn.logprobs or [], strict=True)
    ]
    assert trained == sampled


@BOUNDED
@given(STORIES)
def test_decoding_gives_what_the_agent_saw(story: Story) -> None:
    played = asyncio.run(play(story))
    for turn, answer in zip(story.turns, played.answers, strict=True):
        if turn.cut:
            continue
        message = answer["choices"][0]["message"]
        assert message["content"].strip() == turn.content.strip()
        assert message.get("reasoning_content", "").strip() == turn.reasoning.strip()
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            (name, {"query": query, "limit": limit}) for name, query, limit in turn.calls
        ]
    shown = ["".join(tokenizer().decode(list(turn.prompt_ids))) for turn in played.conversation.turns]
    for request, text in zip(played.requests, shown, strict=True):
        assert request[-1]["content"] in text
        assert all(message["content"] in text for message in request if message["role"] != "assistant")


@BOUNDED
@given(STORIES)
def test_each_turn_stands_whole_in_one_row(story: Story) -> None:
    """What is trained is conditioned on exactly what the policy was shown."""
    played = asyncio.run(play(story))
    rows = [[*row.prompt_ids, *row.completion_ids] for row in played.conversation.segments]
    for turn in played.conversation.turns:
        seen = [*turn.prompt_ids, *turn.completion_ids]
        assert any(row[: len(seen)] == seen for row in rows)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_call_with_an_undeclared_argument_is_a_call(family: str) -> None:
    """It is for the tool to refuse it; as text, it would end the rollout."""
    turn = Turn("hm", "so", (("search", "x", 1),), (4,), "")
    ids = sampled_ids(Story(family, None, None, "x", ()), turn)
    policy = TokenPolicy(CallableEngine(lambda _, sampling: Sample(ids, None, "stop")), renderer(family))
    function = {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    }
    request = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
    }
    answer = asyncio.run(policy.conversation()(request))
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["query"] == "x"


def long_story(family: str) -> tuple[Story, Played]:
    turns = tuple(
        Turn(
            f"I think {number}",
            "Let me look again",
            (("search", "the calendar", number),),
            (3, 5),
            "no such record",
        )
        for number in range(6)
    )
    story = Story(family, "all", "Be brief", "find the record", turns)
    return story, asyncio.run(play(story))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_plain_client_drifts_where_this_one_does_not(family: str) -> None:
    """The same conversation: text kept and rendered anew, against ids kept."""
    story, played = long_story(family)
    ours = [list(turn.prompt_ids) for turn in played.conversation.turns]
    assert drifted(ours, played.sampled) == 0
    assert drifted(plain_prompts(story, played), played.sampled) == 5


@BOUNDED
@given(st.data())
def test_compaction_forks_and_sub_agents_train_no_id_twice(data: st.DataObject) -> None:
    """An agent that at each call goes on, starts over from a summary, forks off an earlier call, or hands to a sub-agent."""
    family = data.draw(st.sampled_from(sorted(CONFIGS)))
    conversation, kinds = asyncio.run(_branching(data, family))
    rows = conversation.segments
    turns = conversation.turns
    assert sum(sum(row.mask) for row in rows) == sum(len(turn.completion_ids) for turn in turns)
    assert rows == assemble(turns)
    assert conversation.prefix_misses == prefix_misses(turns)
    restarts = sum(kind in ("compact", "sub-agent") for kind in kinds[1:])
    assert 1 + restarts <= len(rows) <= 1 + restarts + kinds.count("fork"), kinds
    assert any(row.prompt_ids == list(turns[0].prompt_ids) for row in rows)


async def _branching(data: st.DataObject, family: str) -> tuple[Any, list[str]]:
    lines: list[Any] = []
    policy = TokenPolicy(CallableEngine(lambda ids, sampling: lines.pop()), renderer(family, "all"))
    conversation = policy.conversation()
    histories: list[list[dict[str, Any]]] = []
    kinds: list[str] = []
    newest: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for number in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["go on", "compact", "fork", "sub-agent"])) if histories else "go on"
        if kind == "go on":
            messages = newest
        elif kind == "fork":
            messages = [
                *data.draw(st.sampled_from(histories))[:-1],
                {"role": "user", "content": f"fork {number}"},
            ]
        else:
            messages = [{"role": "user", "content": f"{kind} {number}: a summary"}]
        turn = data.draw(TURNS.filter(lambda turn: not turn.cut))
        ids = sampled_ids(Story(family, "all", None, "x", ()), turn)
        lines.append(Sample(ids, [-0.5] * len(ids), "stop"))
        answer = await conversation({"messages": messages, "tools": TOOLS})
        said = answer["choices"][0]["message"]
        replies = [
            {"role": "tool", "tool_call_id": call["id"], "content": turn.reply}
            for call in said.get("tool_calls", [])
        ]
        newest = [*messages, said, *(replies or [{"role": "user", "content": f"next {number}"}])]
        histories.append(newest)
        kinds.append(kind)
    return conversation, kinds
