"""Sessions as a trainer uses them, over real NeMo Gym servers; a scripted server samples the tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from gymgate.core.errors import ConfigError, DataError, PolicyError, RolloutTimeoutError, TokenDataError
from gymgate.integrations.training.rollouts import MIN_FAILED_GROUPS
from gymgate.openenv import NeMoGymSessionFactory
from gymgate.tokens import assemble
from gymgate.trl import NeMoGymSpec
from support.token_server import CALLS, ENVIRONMENT, TOKENIZER, TokenServer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600)]


def factory_of(server: TokenServer, **more: Any) -> NeMoGymSessionFactory:
    spec = NeMoGymSpec(
        ENVIRONMENT, rows=1, renderer="qwen3", limits={"timeout_s": 60}, stack={"linger_s": 5.0}, **more
    )
    return NeMoGymSessionFactory(spec, TOKENIZER, server.url, sampling={"temperature": 1.0})


@pytest.fixture
def factory(token_server: TokenServer) -> Iterator[NeMoGymSessionFactory]:
    made = factory_of(token_server)
    yield made
    made.close()


def begin(factory: NeMoGymSessionFactory) -> Any:
    return factory.create(factory.spec.train_dataset[0]["prompt"], seed=3, episode_id="x")


def test_a_session_has_the_ids_that_were_sampled_and_the_reward(
    factory: NeMoGymSessionFactory, token_server: TokenServer
) -> None:
    session = begin(factory)
    assert [tool.name for tool in session.list_tools()] == ["increment_counter", "get_counter_value"]
    assert session.initial_messages() == [{"role": "user", "content": "add 1 then add 2 then get the count"}]
    with pytest.raises(ConfigError, match="use gymgate serve-env"):
        session.call_tool("increment_counter", {"count": 1})
    assert session.wait_for_completion(60) == 0
    trace = session.fetch_training_trace()
    assert [
        (turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps) for turn in trace.turns
    ] == [(list(turn.prompt_ids), list(turn.completion_ids), turn.logprobs) for turn in token_server.turns]
    assert len(trace.turns) == len(CALLS) + 1
    for turn in trace.turns:
        assert turn.loss_mask == [0] * len(turn.prompt_token_ids) + [1] * len(turn.completion_token_ids)
    called = [turn.response["choices"][0]["message"].get("tool_calls") for turn in trace.turns]
    names = ["increment_counter", "increment_counter", "get_counter_value"]
    assert [calls[0]["function"]["name"] for calls in called[:3]] == names
    assert trace.turns[-1].request["messages"][-1]["role"] == "tool"
    (segment,) = session._conversation.segments
    assert [segment.model_copy(update={"policy_version": None})] == assemble(token_server.turns)
    verified = session.verify([])
    assert (verified.env_reward, verified.done, verified.artifacts["outcome"]) == (1.0, True, "completed")
    session.close()


def test_a_failed_rollout_is_raised_and_has_no_reward(
    factory: NeMoGymSessionFactory, token_server: TokenServer
) -> None:
    token_server.begin = lambda number: "refuse"
    session = begin(factory)
    with pytest.raises(PolicyError, match="400"):
        session.wait_for_completion()
    assert session.verify([]).env_reward is None
    assert session.fetch_training_trace().turns == []


def test_an_engine_without_logprobs_ends_the_training(
    factory: NeMoGymSessionFactory, token_server: TokenServer
) -> None:
    token_server.begin = lambda number: "no logprobs"
    session = begin(factory)
    session.wait_for_completion()
    with pytest.raises(TokenDataError, match="no logprob"):
        session.fetch_training_trace()


def test_another_prompt_is_refused(factory: NeMoGymSessionFactory) -> None:
    with pytest.raises(DataError, match="NeMoGymSpec"):
        factory.create([{"role": "user", "content": "hello"}])


def test_a_training_in_which_every_rollout_fails_ends(
    factory: NeMoGymSessionFactory, token_server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory._runner.guard, "batch_size", 1)
    token_server.begin = lambda number: "refuse"
    for _ in range(MIN_FAILED_GROUPS - 1):
        with pytest.raises(PolicyError):
            begin(factory).wait_for_completion()
    last = begin(factory)
    assert last.wait_for_completion() == 1
    with pytest.raises(TokenDataError, match=r"\b8 batches .*\(8 rollouts"):
        last.fetch_training_trace()


def test_a_session_that_is_closed_or_late_has_no_reward(token_server: TokenServer) -> None:
    token_server.together = threading.Barrier(2)  # nobody else comes until the test does
    factory = factory_of(token_server)
    try:
        session = begin(factory)
        with pytest.raises(TimeoutError):
            session.wait_for_completion(0.1)
        assert session.verify([]).env_reward is None
        token_server.together.wait(timeout=60)
        assert session.wait_for_completion(60) == 0
        closed = begin(factory)
        closed.close()
        closed.close()
        with pytest.raises(CancelledError):
            closed.wait_for_completion(60)
        token_server.together.abort()
    finally:
        factory.close()


def test_a_rollout_that_runs_out_of_time_counts_as_timed_out(token_server: TokenServer) -> None:
    token_server.together = threading.Barrier(2)
    spec = NeMoGymSpec(ENVIRONMENT, rows=1, renderer="qwen3", limits={"timeout_s": 1.0})
    factory = NeMoGymSessionFactory(spec, TOKENIZER, token_server.url)
    try:
        session = begin(factory)
        with pytest.raises(RolloutTimeoutError):  # a TimeoutError, which TRL's worker expects
            session.wait_for_completion(60)
        assert session.verify([]).env_reward is None
        token_server.together.abort()
    finally:
        factory.close()
