"""Segments from turns: hand-drawn cases, then properties over random conversations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymgate.core.errors import TokenDataError
from gymgate.rollouts.record import ModelCall, Rollout, Segment
from gymgate.tokens.segments import (
    SampledCall,
    TokenTurn,
    assemble,
    prefix_misses,
    recorded_turns,
    segments_of,
)


def test_one_turn() -> None:
    """p p S S"""
    assert assemble([TokenTurn([1, 2], [3, 4], [-0.1, -0.2], (7, 7))]) == [
        Segment(
            prompt_ids=[1, 2],
            completion_ids=[3, 4],
            mask=[1, 1],
            logprobs=[-0.1, -0.2],
            policy_version=(7, 7),
        )
    ]


def test_a_tool_result_between_two_turns_is_masked() -> None:
    """p p S S, then p p S S t t S: one row."""
    first = TokenTurn([1, 2], [3, 4], [-0.1, -0.2], (7, 7))
    second = TokenTurn([1, 2, 3, 4, 90, 91], [5], [-0.3], (8, 9))
    (segment,) = assemble([first, second])
    assert segment.prompt_ids == [1, 2]
    assert segment.completion_ids == [3, 4, 90, 91, 5]
    assert segment.mask == [1, 1, 0, 0, 1]
    assert segment.logprobs == [-0.1, -0.2, None, None, -0.3]
    assert segment.policy_version == (7, 9)


def test_a_compacted_history_starts_a_row_of_its_own() -> None:
    """The second prompt is a summary: shorter, and no extension."""
    rows = assemble([TokenTurn([1, 2, 3], [4]), TokenTurn([1, 9], [5])])
    assert [(row.prompt_ids, row.completion_ids, row.mask) for row in rows] == [
        ([1, 2, 3], [4], [1]),
        ([1, 9], [5], [1]),
    ]


def test_a_fork_trains_the_shared_tokens_once() -> None:
    """Two continuations of one turn: the first extends it, the second holds it as prompt."""
    root = TokenTurn([1], [2])
    rows = assemble([root, TokenTurn([1, 2, 8], [3]), TokenTurn([1, 2, 9], [4])])
    assert [(row.prompt_ids, row.completion_ids, row.mask) for row in rows] == [
        ([1], [2, 8, 3], [1, 0, 1]),
        ([1, 2, 9], [4], [1]),
    ]


def test_a_turn_goes_on_from_the_longest_row_that_it_extends() -> None:
    """One prompt sampled twice; the third turn was shown the longer answer."""
    rows = assemble([TokenTurn([1], [2]), TokenTurn([1], [2, 3]), TokenTurn([1, 2, 3, 9], [4])])
    assert [(row.prompt_ids, row.completion_ids, row.mask) for row in rows] == [
        ([1], [2], [1]),
        ([1], [2, 3, 9, 4], [1, 1, 0, 1]),
    ]


def test_missing_logprobs_stay_missing() -> None:
    (row,) = assemble([TokenTurn([1], [2])])
    assert row.logprobs is None
    (row,) = assemble([TokenTurn([1], [2]), TokenTurn([1, 2], [3], [-0.5])])
    assert row.logprobs == [None, -0.5]


def test_a_turn_that_sampled_nothing_adds_nothing() -> None:
    assert assemble([TokenTurn([1], [])]) == []


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (TokenTurn([1], [2, 3], [-0.1]), "1 logprobs for 2 completion ids"),
        (TokenTurn([1], [2], [math.nan]), "finite"),
        (TokenTurn([1], [2], [-math.inf]), "finite"),
        (TokenTurn([1], [-2]), "token id"),
        (TokenTurn([1.5], [2]), "token id"),
        (TokenTurn([], [2]), "prompt_ids is empty"),
        (TokenTurn([1], [True]), "token id"),
        (TokenTurn([1], [2], [-9999.0]), "-9999"),
    ],
)
def test_malformed_turns_are_refused(turn: TokenTurn, message: str) -> None:
    with pytest.raises(TokenDataError, match=message):
        assemble([turn])


def test_a_call_that_is_not_trained_stays_in_the_row_of_the_next() -> None:
    """p S, p S t S, p S t S t S, of which the second call is left out: its ids are shown and masked."""
    first = SampledCall.after(None, TokenTurn([1], [2], [-0.1]))
    second = SampledCall.after(first, TokenTurn([1, 2, 3], [4], [-0.2]))
    third = SampledCall.after(second, TokenTurn([1, 2, 3, 4, 5], [6], [-0.3]))
    (row,) = segments_of([first, second, third], {second})
    assert (row.prompt_ids, row.completion_ids, row.mask) == ([1], [2, 3, 4, 5, 6], [1, 0, 0, 0, 1])


def test_drift_counts_prompts_that_extend_nothing() -> None:
    assert prefix_misses([TokenTurn([1], [2]), TokenTurn([1, 2, 3], [4]), TokenTurn([1, 5], [6])]) == 1


def recorded(*calls: ModelCall) -> Rollout:
    return Rollout(id="r", environment="e", agent="a", status="completed", reward=1.0, calls=list(calls))


def test_recorded_calls_become_turns() -> None:
    """The judge's call and the one that failed are no turns."""
    rollout = recorded(
        ModelCall(index=0, dialect="chat", prompt_token_ids=[1], completion_token_ids=[2], logprobs=[-0.5]),
        ModelCall(index=1, dialect="chat", model_server="judge"),
        ModelCall(index=2, dialect="chat", error="policy: gone"),
        ModelCall(index=3, dialect="chat", prompt_token_ids=[1, 2, 9], completion_token_ids=[3]),
    )
    assert recorded_turns(rollout) == [TokenTurn([1], [2], [-0.5]), TokenTurn([1, 2, 9], [3])]
    (row,) = assemble(recorded_turns(rollout))
    assert (row.mask, row.logprobs) == ([1, 0, 1], [-0.5, None, None])


@pytest.mark.parametrize(
    "ids", [{}, {"completion_token_ids": [2]}, {"prompt_token_ids": [1]}], ids=["none", "no prompt", "prompt"]
)
def test_an_answer_recorded_without_ids_is_an_error(ids: dict[str, list[int]]) -> None:
    with pytest.raises(TokenDataError, match="call 0 "):
        recorded_turns(recorded(ModelCall.model_validate({"index": 0, "dialect": "chat", **ids})))


TOKENS = st.integers(0, 50)
IDS = st.lists(TOKENS, min_size=1, max_size=5)


@st.composite
def conversations(draw: st.DrawFn) -> list[TokenTurn]:
    """Turns that continue any earlier turn, or start over."""
    turns: list[TokenTurn] = []
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *turns]))
        base = [] if parent is None else [*parent.prompt_ids, *parent.completion_ids]
        completion = draw(IDS)
        logprobs = draw(st.lists(st.floats(-9, 0), min_size=len(completion), max_size=len(completion)))
        turns.append(TokenTurn([*base, *draw(IDS)], completion, logprobs))
    return turns


@given(conversations())
def test_every_sampled_id_is_trained_exactly_once(turns: list[TokenTurn]) -> None:
    rows = assemble(turns)
    assert sum(sum(row.mask) for row in rows) == sum(len(turn.completion_ids) for turn in turns)
    trained = sorted(
        (token, logprob)
        for row in rows
        for token, logprob, mask in zip(row.completion_ids, row.logprobs or [], row.mask, strict=True)
        if mask
    )
    sampled = sorted(
        pair for turn in turns for pair in zip(turn.completion_ids, turn.logprobs or [], strict=True)
    )
    assert trained == sampled


@given(conversations())
def test_every_turn_stands_whole_in_one_row(turns: list[TokenTurn]) -> None:
    """What was trained was conditioned on exactly what the policy was shown."""
    rows = [[*row.prompt_ids, *row.completion_ids] for row in assemble(turns)]
    for turn in turns:
        shown = [*turn.prompt_ids, *turn.completion_ids]
        assert any(row[: len(shown)] == shown for row in rows)


@given(conversations())
def test_unsampled_positions_carry_no_logprob(turns: list[TokenTurn]) -> None:
    for row in assemble(turns):
        assert len(row.mask) == len(row.completion_ids) == len(row.logprobs or [])
        assert all(
            (value is None) == (not mask) for value, mask in zip(row.logprobs or [], row.mask, strict=True)
        )
