"""A rollout's model calls as ids, with a renderer that writes one id per word: what is extended, and how much may be sampled."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.errors import PolicyError
from gymgate.rollouts.record import UNDELIVERED, ModelCall
from gymgate.tokens import TokenConversation, TokenPolicy, assemble, prefix_misses
from gymgate.tokens.engines import CallableEngine, Sample
from gymgate.tokens.messages import assistant_message, chat_answer

OPENING = 1
"""The id that opens an answer."""


class WordRenderer:
    """Each word is a number and its own id; an answer is the ids sampled."""

    def __init__(self, *, rewrites: bool = False) -> None:
        self.rewrites = rewrites
        """Whether a bridge changes what was sampled, as templates that drop reasoning do."""

    def render_ids(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        ids = [int(word) for message in messages for word in message["content"].split()]
        return [*ids, OPENING] if add_generation_prompt else ids

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> Any:
        return SimpleNamespace(content=" ".join(map(str, token_ids)), reasoning_content=None, tool_calls=None)

    def get_stop_token_ids(self) -> list[int]:
        return [2]

    def bridge_to_next_turn(
        self, prompt_ids: list[int], completion_ids: list[int], new: list[Any], *, tools: Any = None
    ) -> Any:
        seen = [*prompt_ids, *completion_ids]
        return SimpleNamespace(
            token_ids=[*(reversed(seen) if self.rewrites else seen), *self.render_ids(new), OPENING]
        )


class Talk:
    """A conversation whose agent keeps the history; the engine samples as many ids as it may, three at most."""

    def __init__(self, renderer: WordRenderer | None = None, **policy: Any) -> None:
        self.asked: list[tuple[list[int], Any]] = []
        self.stops: list[Any] = []
        self.next_id = 100
        engine = CallableEngine(self.sample)
        self.policy = TokenPolicy(engine, renderer or WordRenderer(), **policy)
        self.conversation: TokenConversation = self.policy.conversation()
        self.history: list[dict[str, Any]] = []

    def sample(self, prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        count = min(3, sampling.get("max_tokens", 3))
        self.asked.append((list(prompt_ids), sampling.get("max_tokens")))
        self.stops.append(sampling.get("stop_token_ids"))
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        return Sample(ids, [-0.5] * count, "stop" if count == 3 else "length", (7, 7))

    async def say(self, words: str, **request: Any) -> dict[str, Any]:
        """Add a user's message, ask, and keep the answer; its choice."""
        self.history.append({"role": "user", "content": words})
        answer = await self.conversation({"messages": self.history, **request})
        choice: dict[str, Any] = answer["choices"][0]
        self.history.append(choice["message"])
        return choice


async def test_each_prompt_extends_the_ids_before_it() -> None:
    talk = Talk()
    for words in ("10 11", "12", "13"):
        await talk.say(words)
    assert [prompt for prompt, _ in talk.asked] == [
        [10, 11, 1],
        [10, 11, 1, 100, 101, 102, 12, 1],
        [10, 11, 1, 100, 101, 102, 12, 1, 103, 104, 105, 13, 1],
    ]
    assert [turn.prompt_ids for turn in talk.conversation.turns] == [prompt for prompt, _ in talk.asked]
    assert talk.conversation.prefix_misses == 0
    [segment] = talk.conversation.segments
    assert segment.mask == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert segment.completion_ids == [100, 101, 102, 12, 1, 103, 104, 105, 13, 1, 106, 107, 108]


@pytest.mark.parametrize("empty", [{"tool_calls": []}, {"refusal": None}, {"reasoning_content": ""}])
async def test_an_empty_field_that_an_agent_adds_changes_no_history(empty: dict[str, Any]) -> None:
    talk = Talk()
    await talk.say("10")
    talk.history[-1] = {**talk.history[-1], **empty}
    await talk.say("12")
    assert talk.conversation.prefix_misses == 0


async def test_a_history_that_was_edited_is_rendered_anew() -> None:
    talk = Talk()
    await talk.say("10")
    talk.history[-1] = {**talk.history[-1], "content": "55"}
    await talk.say("12")
    assert talk.asked[-1][0] == [10, 55, 12, 1]
    assert (talk.conversation.prefix_misses, len(talk.conversation.segments)) == (1, 2)


async def test_segments_are_those_of_the_turns() -> None:
    """An agent that goes on, forks off an earlier call, goes on with the fork, starts over, and comes back to the first."""
    talk = Talk()
    await talk.say("10 11")
    fork = list(talk.history)
    await talk.say("12")
    first, talk.history = talk.history, fork
    await talk.say("13")
    await talk.say("14")
    talk.history = [{"role": "user", "content": "77"}]
    await talk.say("15")
    talk.history = first
    await talk.say("16")
    turns = talk.conversation.turns
    assert talk.conversation.segments == assemble(turns)
    assert len(talk.conversation.segments) == 3
    assert talk.conversation.prefix_misses == prefix_misses(turns) == 1
    assert talk.conversation.call_count == len(turns) == 6


async def test_a_history_rendered_anew_may_still_extend_earlier_ids() -> None:
    """The agent changed an answer in a way that does not show."""
    talk = Talk()
    await talk.say("10")
    talk.history = [{"role": "user", "content": "10 1 100 101 102"}]
    await talk.say("12")
    turns = talk.conversation.turns
    assert talk.conversation.prefix_misses == prefix_misses(turns) == 0
    assert talk.conversation.segments == assemble(turns)
    assert len(talk.conversation.segments) == 1


async def test_a_turn_without_ids_leaves_its_row_open() -> None:
    talk = Talk()
    await talk.say("10")
    sample, talk.sample = talk.sample, lambda ids, sampling: Sample([], [], "stop")  # type: ignore[method-assign]
    talk.policy.engine.function = talk.sample  # type: ignore[attr-defined]
    await talk.say("12")
    talk.policy.engine.function = sample  # type: ignore[attr-defined]
    await talk.say("13")
    assert talk.conversation.segments == assemble(talk.conversation.turns)
    [segment] = talk.conversation.segments
    assert sum(segment.mask) == 6


async def test_the_event_loop_goes_on_while_a_history_is_rendered() -> None:
    loop_went_on, seen = threading.Event(), []

    class Slow(WordRenderer):
        def render_ids(self, messages: list[Any], **asked: Any) -> list[int]:
            seen.append(loop_went_on.wait(5))
            return super().render_ids(messages, **asked)

    talk = Talk(Slow())
    asyncio.get_running_loop().call_soon(loop_went_on.set)
    await talk.say("10")
    assert seen == [True]


async def test_a_renderer_that_rewrites_what_was_sampled_is_not_believed() -> None:
    talk = Talk(WordRenderer(rewrites=True))
    await talk.say("10")
    await talk.say("12")
    assert talk.asked[-1][0] == [10, 100, 101, 102, 12, 1]
    assert talk.conversation.prefix_misses == 1


async def test_the_bound_on_completions_holds_over_the_turns_of_a_rollout() -> None:
    """Beyond the first prompt, what came between the turns included: 3 ids, 2 between, 2 ids, nothing."""
    talk = Talk(max_completion_len=7)
    choices = [await talk.say(words) for words in ("10", "11", "12")]
    assert [room for _, room in talk.asked] == [7, 2]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "length"]
    [segment] = talk.conversation.segments
    assert len(segment.completion_ids) == 7


async def test_the_bound_on_completions_holds_for_a_segment_with_a_shorter_prompt() -> None:
    """After compaction, or for a sub-agent. The rollout's own bound would leave three ids more in the end."""
    talk = Talk(max_completion_len=4)
    await talk.say("10 11 12 13")
    talk.history = []
    await talk.say("77", max_tokens=2)
    await talk.say("78")
    assert [room for _, room in talk.asked] == [4, 2]
    assert [len(segment.completion_ids) for segment in talk.conversation.segments] == [3, 2]


async def test_the_narrower_bound_holds() -> None:
    talk = Talk(max_model_len=4, max_completion_len=50)
    choice = await talk.say("10 11", max_tokens=40)
    assert talk.asked == [([10, 11, 1], 1)]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("100", "length")
    talk = Talk(max_model_len=50, max_completion_len=2)
    await talk.say("10 11")
    await talk.say("12", max_tokens=1)
    assert talk.asked == [([10, 11, 1], 2)]


async def test_what_the_agent_asks_for_holds_below_the_bounds() -> None:
    talk = Talk(max_model_len=50)
    await talk.say("10", max_tokens=1)
    assert talk.asked == [([10, 1], 1)]


async def test_a_prompt_that_fills_the_context_samples_nothing() -> None:
    talk = Talk(max_model_len=3)
    choice = await talk.say("10 11")
    assert (talk.asked, choice["message"]["content"], choice["finish_reason"]) == ([], "", "length")
    assert talk.conversation.turns == []


async def test_an_empty_answer_that_its_agent_never_got_leaves_the_next_one_in() -> None:
    talk = Talk()
    empty = await talk.conversation({"messages": [{"role": "user", "content": "9"}], "max_tokens": 0})
    await talk.say("10")
    lost = ModelCall(index=0, dialect="chat", details={UNDELIVERED: empty["id"]})
    talk.conversation.leave_out([lost])
    assert [segment.mask for segment in talk.conversation.segments] == [[1, 1, 1]]


async def test_a_turn_that_its_agent_never_got_says_so() -> None:
    talk = Talk()
    first = await talk.conversation({"messages": [{"role": "user", "content": "9"}]})
    await talk.say("10")
    talk.conversation.leave_out([ModelCall(index=0, dialect="chat", details={UNDELIVERED: first["id"]})])
    assert [talk.conversation.is_left_out(number) for number in range(2)] == [True, False]
    assert len(talk.conversation.turns) == 2


async def test_the_engine_is_told_where_a_turn_ends() -> None:
    talk = Talk()
    await talk.say("10")
    assert talk.stops == [[2]]


async def test_an_answer_that_the_engine_aborted_is_cut_off() -> None:
    """An agent must not take it for a finished one."""
    aborted = Sample([5], None, "abort")
    answer = chat_answer("a", {}, {"role": "assistant", "content": "5"}, [1], aborted, with_ids=False)
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_tool_call_in_an_answer_that_was_cut_is_not_the_end_of_it() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}
    for finish, told in (("length", "length"), ("stop", "tool_calls")):
        answer = chat_answer("a", {}, message, [1], Sample([5], None, finish), with_ids=False)
        assert answer["choices"][0]["finish_reason"] == told


@pytest.mark.parametrize(
    ("status", "name", "arguments", "made"),
    [
        ("ok", "search", {"q": 1}, True),
        ("invalid_json", "search", {"undeclared": 1}, True),
        ("invalid_json", "search", None, False),
        ("unclosed", "search", {"q": 1}, False),
        ("ok", None, {"q": 1}, False),
    ],
)
def test_a_tool_call_that_cannot_be_made_stays_text(
    status: str, name: str | None, arguments: Any, made: bool
) -> None:
    call = SimpleNamespace(status=status, name=name, arguments=arguments, raw="<raw>", id=None)
    message = assistant_message(
        SimpleNamespace(content="so", reasoning_content=None, tool_calls=[call]), "s_0"
    )
    if made:
        [sent] = message["tool_calls"]
        assert (sent["id"], sent["function"]["name"]) == ("call_s_0_0", "search")
        assert (message["content"], json.loads(sent["function"]["arguments"])) == ("so", arguments)
    else:
        assert ("tool_calls" in message, message["content"]) == (False, "so\n<raw>")


async def test_several_answers_to_one_call_are_refused() -> None:
    with pytest.raises(PolicyError, match="n=2"):
        await Talk().say("10", n=2)
