"""Rewards without a recording: what counts as one, stand-ins for judges, cohorts, answers given in their order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import UnknownConversationError
from gymgate.gateway.replay.recording import recorded_rollouts
from gymgate.gym.catalog import EnvConfig
from gymgate.quality.recorded_models import (
    PLAYED_IN_ORDER,
    PLAYED_LAST,
    STAND_IN,
    OrderedPolicy,
    RecordedJudge,
)
from gymgate.quality.reward_trial import RewardTrial
from gymgate.rollouts import ModelCall, Rollout
from gymgate.stack import Policy

ROW = {"responses_create_params": {"input": "?"}}


def rollout(reward: float | None, *models: str) -> Rollout:
    calls = [ModelCall(index=n, model_server=model, dialect="responses") for n, model in enumerate(models)]
    return Rollout(id="r", environment="e", agent="a", status="completed", reward=reward, calls=calls)


def probe(
    tmp_path: Path, told: Callable[[dict[str, Any]], Rollout], judge: RecordedJudge, cohort: int = 1
) -> RewardTrial:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"s": {"resources_servers": {"e": {"num_rollouts_per_prompt": cohort}}}}))

    async def run(row: dict[str, Any], policy: Policy) -> Rollout:
        if "ask" in row:
            try:
                await judge({"input": row["ask"]})
            except UnknownConversationError:
                return rollout(0.0, "policy_model")
        return told(row)

    return RewardTrial(run, judge, EnvConfig("c", path))


async def test_a_reward_counts_only_if_the_policy_was_asked(tmp_path: Path) -> None:
    silent = probe(tmp_path, lambda row: rollout(0.0), RecordedJudge("e"))
    await silent.run([ROW])
    assert not silent.rewarded
    asked = probe(tmp_path, lambda row: rollout(0.0, "policy_model"), RecordedJudge("e"))
    await asked.run([ROW])
    assert (asked.rewarded, asked.by_stand_in, asked.judge_missing) == (True, False, False)


async def test_a_masked_reward_does_not_count(tmp_path: Path) -> None:
    """As a judge's failure, which is told by masking the sample."""
    taken_back = rollout(0.0, "policy_model").model_copy(update={"status": "masked"})
    masked = probe(tmp_path, lambda row: taken_back, RecordedJudge("e"))
    await masked.run([ROW])
    assert not masked.rewarded


async def test_a_judge_is_stood_in_for_only_after_it_was_missed(tmp_path: Path) -> None:
    judge = RecordedJudge("e")
    tried = probe(tmp_path, lambda row: rollout(1.0, "policy_model"), judge)
    await tried.run([{**ROW, "ask": "right?"}])
    assert (tried.rewarded, tried.by_stand_in, tried.judge_missing) == (True, True, True)
    assert judge.judged_by == "stand-in"
    answer = await judge({"input": "right?"})
    assert answer["output"][0]["content"][0]["text"] == STAND_IN


async def test_a_reward_that_no_judge_was_asked_for_is_not_by_stand_in(tmp_path: Path) -> None:
    """The first row misses its judge, and then gets no reward with the stand-in; the second asks none and gets one."""
    judge, rewards = RecordedJudge("e"), iter([None, None, 1.0])
    tried = probe(tmp_path, lambda row: rollout(next(rewards), "policy_model"), judge)
    await tried.run([{**ROW, "ask": "right?"}, ROW])
    assert (tried.rewarded, tried.by_stand_in, tried.judge_missing) == (True, False, True)


async def test_a_cohort_is_run_at_once_with_a_place_for_each(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def told(row: dict[str, Any]) -> Rollout:
        seen.append((row["_ng_group_id"], row["_ng_rollout_index"]))
        return rollout(3.0, "policy_model")

    tried = probe(tmp_path, told, RecordedJudge("e"), cohort=4)
    await tried.run([ROW])
    assert tried.rewarded
    assert [place for _, place in seen] == [0, 1, 2, 3]
    assert len({group for group, _ in seen}) == 1


async def test_each_cohort_is_a_task_of_its_own(tmp_path: Path) -> None:
    """Else its environment gives the score of the one before, of a judge that failed."""
    tasks: list[int] = []

    def told(row: dict[str, Any]) -> Rollout:
        tasks.append(row["_ng_task_index"])
        return rollout(None, "policy_model")

    await probe(tmp_path, told, RecordedJudge("e"), cohort=2).run([ROW, ROW])
    assert tasks[0] == tasks[1] != tasks[2] == tasks[3]


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def call(name: str) -> list[dict[str, Any]]:
    output = {"type": "function_call_output", "call_id": name, "output": "42"}
    return [{"type": "function_call", "name": name, "arguments": "{}", "call_id": name}, output]


@pytest.mark.parametrize(
    ("output", "answers", "how"),
    [
        ([message("a"), message("b")], ["a", "b", "b"], PLAYED_IN_ORDER),
        ([message("a"), *call("Bash"), message("b")], ["b", "b", "b"], PLAYED_LAST),
        ([*call("mcp__weather"), message("b")], ["mcp__weather", "b", "b"], PLAYED_IN_ORDER),
    ],
)
async def test_answers_are_given_in_their_order(
    tmp_path: Path, output: list[dict[str, Any]], answers: list[str], how: str
) -> None:
    path = tmp_path / "rollouts.jsonl"
    record = {"responses_create_params": {"input": [{"role": "user", "content": "?"}]}, "reward": 1.0}
    path.write_text(json.dumps({**record, "response": {"output": output}}))
    policy = OrderedPolicy()
    assert policy.begin(recorded_rollouts([path])[0])
    assert policy.how == how
    told = []
    for question in ("x", "y", "z"):
        (item,) = (await policy({"input": question}))["output"]
        told.append(item.get("name") or item["content"][0]["text"])
    assert told == answers
