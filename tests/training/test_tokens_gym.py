"""Through a real NeMo Gym agent and its tools: reasoning, several turns, ids that encoding would not give."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("renderers", reason="needs the renderers package: see docs/training.md")
pytest.importorskip("transformers", reason="needs transformers: see docs/training.md")

from gymgate import open_rows
from gymgate.core.config import StackConfig
from gymgate.stack import acquire
from gymgate.tokens import TokenConversation, TokenPolicy, assemble, prefix_misses, recorded_turns
from gymgate.tokens.engines import CallableEngine, Sample
from support.conversations import CONFIGS, Story, Turn, renderer, sampled_ids, tokenizer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(300)]

TURNS = 4


def lines(family: str) -> Iterator[list[int]]:
    """Three turns with a call each, with an argument that the tool does not have, then an answer."""
    story = Story(family, None, None, "x", ())
    for number in range(TURNS):
        last = number == TURNS - 1
        calls = () if last else (("email_search_emails", f"day {number}", number),)
        said = Turn(f"I think of step {number}", f"Step {number}.", calls, (3, 5, 2), "")
        yield sampled_ids(story, said)


class Policy:
    """Says its lines to each rollout, in order of the conversation."""

    def __init__(self, family: str) -> None:
        self.said = list(lines(family))
        self.engine = CallableEngine(self.sample)
        self.policy = TokenPolicy(self.engine, renderer(family), sampling={"temperature": 1.0})

    async def sample(self, prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        ids = self.said[tokenizer().decode(prompt_ids).count("I think of step")]
        return Sample(list(ids), [-0.01] * len(ids), "stop", (2, 2))


async def test_ids_reach_the_record_where_that_is_asked_for() -> None:
    """Recorded calls give the segments that the conversation has."""
    row = next(iter(open_rows("workplace_assistant"))).data
    policy = TokenPolicy(Policy("qwen3").engine, renderer("qwen3"), answers_with_ids=True)
    conversation = policy.conversation()
    async with acquire(StackConfig(environments=("workplace_assistant",))) as stack:
        rollout = await stack.run(row, policy=conversation)
    recorded = assemble(recorded_turns(rollout))
    known = [segment.model_copy(update={"policy_version": None}) for segment in conversation.segments]
    assert recorded == known
    assert len(known) == 1


async def test_a_rollout_with_tools_is_one_segment() -> None:
    """What the agent sends back is recognised, through the Responses API that it speaks, as what it was given."""
    row = next(iter(open_rows("workplace_assistant"))).data
    policies = {family: Policy(family) for family in CONFIGS}
    async with acquire(StackConfig(environments=("workplace_assistant",))) as stack:
        played: list[tuple[str, TokenConversation]] = []

        async def run(family: str) -> None:
            conversation = policies[family].policy.conversation()
            rollout = await stack.run(row, policy=conversation)
            assert rollout.error is None, rollout.error
            played.append((family, conversation))

        await asyncio.gather(*(run(family) for family in CONFIGS for _ in range(4)))
    assert len(played) == 4 * len(CONFIGS)
    for family, conversation in played:
        turns = conversation.turns
        assert [list(turn.completion_ids) for turn in turns] == policies[family].said, family
        assert (conversation.prefix_misses, prefix_misses(turns)) == (0, 0), family
        (segment,) = conversation.segments
        assert sum(segment.mask) == sum(map(len, policies[family].said))
        assert segment.policy_version == (2, 2)
        sampled = list(itertools.compress(segment.completion_ids, segment.mask))
        assert sampled == list(itertools.chain.from_iterable(policies[family].said))
