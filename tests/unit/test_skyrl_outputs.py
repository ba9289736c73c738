"""Rollouts as the output of a SkyRL generator, its sampling parameters and settings: plain values, without SkyRL."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.errors import ConfigError, TokenDataError
from gymgate.integrations.skyrl.dataset import NeMoGymDataset
from gymgate.integrations.skyrl.engine import (
    GeneratorSettings,
    InferenceServersEngine,
    check_config,
    pinned_sampling,
)
from gymgate.integrations.skyrl.outputs import TrainedRow, log_entries, reward_of, to_output, to_rows
from gymgate.integrations.training.rollouts import SampledRollout, rollout_metrics
from gymgate.rollouts import Rollout, RolloutError, Timing
from gymgate.tokens import TokenTurn, assemble, prefix_misses

EOS = 9
FAILED = {
    "status": "failed",
    "reward": None,
    "error": RolloutError(kind="policy", message="x", type="PolicyError"),
}


@dataclass(frozen=True)
class Id:
    instance_id: str
    repetition_id: int


def sampled(*turns: TokenTurn, **fields: Any) -> SampledRollout:
    rollout = Rollout(
        id="r", environment="a", agent="agent", **{"status": "completed", "reward": 0.5, **fields}
    )
    return SampledRollout(rollout, assemble(turns), len(turns), prefix_misses(turns), [1])


def ids(groups: str) -> list[Id]:
    return [Id(group, number) for number, group in enumerate(groups)]


ONE = TokenTurn([1], [2], [-0.5])


def rows_of(groups: str, rewards: list[float | None], *, evaluation: bool = False) -> list[TrainedRow]:
    rollouts = [sampled(ONE) for _ in groups]
    return to_rows(rollouts, ids(groups), rewards, filler_id=EOS, evaluation=evaluation)


def shown(rows: list[TrainedRow]) -> list[tuple[str, float, bool]]:
    """Group, reward, and whether it is trained on."""
    return [(row.id.instance_id, row.reward, any(row.segment.mask)) for row in rows]


def test_each_segment_is_a_step_and_the_last_one_ends_the_trajectory() -> None:
    """turn 1  p p S S      turn 2  p p S S t S      turn 3 (compacted)  q S"""
    rollout = sampled(
        TokenTurn([1, 2], [3, 4], [-0.1, -0.2]),
        TokenTurn([1, 2, 3, 4, 5], [6], [-0.3]),
        TokenTurn([9], [7], [-0.4]),
        timing=Timing(total_s=3.0, model_s=1.0),
    )
    rows = to_rows([rollout, sampled(ONE)], ids("aa"), [0.5, 1.0], filler_id=EOS)
    made = to_output(rows, {"x": 1})
    assert made["prompt_token_ids"] == [[1, 2], [9], [1]]
    assert made["response_ids"] == [[3, 4, 5, 6], [7], [2]]
    assert made["loss_masks"] == [[1, 1, 0, 1], [1], [1]]
    assert made["rollout_logprobs"] == [[-0.1, -0.2, 0.0, -0.3], [-0.4], [-0.5]]
    assert made["rewards"] == [0.5, 0.5, 1.0]
    assert made["is_last_step"] == [False, True, True]
    assert [id.repetition_id for id in made["trajectory_ids"]] == [0, 0, 1]
    assert made["trajectory_generation_times"] == [3.0, 3.0, 0.0]
    assert made["trajectory_time_splits"] == {"llm": [1.0, 1.0, 0.0], "env": [2.0, 2.0, 0.0]}


def test_a_rollout_without_a_reward_has_no_row() -> None:
    assert shown(rows_of("aaabb", [1.0, None, 0.0, 1.0, 0.0])) == [
        ("a", 1.0, True),
        ("a", 0.0, True),
        ("b", 1.0, True),
        ("b", 0.0, True),
    ]


def test_a_group_without_a_reward_has_one_masked_row() -> None:
    rows = rows_of("aabb", [None, None, 1.0, 0.0])
    assert shown(rows) == [("a", 0.0, False), ("b", 1.0, True), ("b", 0.0, True)]
    assert (rows[0].stop_reason, rows[0].is_last) == ("error", True)


def test_the_only_reward_of_a_group_is_not_trained_on() -> None:
    """SkyRL's advantage of it would be the whole reward. Where a group is one rollout, that is what the user wants."""
    assert shown(rows_of("aab", [1.0, None, 1.0])) == [("a", 1.0, False), ("b", 1.0, True)]


def test_an_evaluation_has_rows_of_scored_rollouts_only() -> None:
    assert shown(rows_of("aab", [1.0, None, None], evaluation=True)) == [("a", 1.0, True)]
    (row,) = rows_of("ab", [None, None], evaluation=True)
    assert math.isnan(row.reward)


def test_a_scored_rollout_that_sampled_nothing_keeps_its_reward() -> None:
    rows = to_rows([sampled(), sampled(ONE)], ids("aa"), [0.0, 1.0], filler_id=EOS)
    assert shown(rows) == [("a", 0.0, False), ("a", 1.0, True)]
    assert to_output(rows, {})["rollout_logprobs"] == [[0.0], [-0.5]]


def test_a_sampled_id_without_a_logprob_is_not_given_one() -> None:
    rows = to_rows([sampled(TokenTurn([1], [2]))], ids("a"), [1.0], filler_id=EOS)
    with pytest.raises(TokenDataError):
        to_output(rows, {})


@pytest.mark.parametrize(
    ("fields", "training", "scored", "evaluation"),
    [
        ({}, 0.5, 0.5, 0.5),
        ({"status": "truncated"}, None, 0.5, 0.5),
        ({"status": "masked"}, None, None, None),
        ({"reward": None}, None, None, None),
        (FAILED, None, None, None),
    ],
)
def test_the_reward_of_each_outcome(
    fields: dict[str, Any], training: float | None, scored: float | None, evaluation: float | None
) -> None:
    rollout = sampled(ONE, **fields)

    def reward(*, score_truncated: bool = False, evaluation: bool = False) -> float | None:
        return reward_of(rollout, {"reward": 1.0}, score_truncated=score_truncated, evaluation=evaluation)

    assert (reward(), reward(score_truncated=True), reward(evaluation=True)) == (training, scored, evaluation)


def test_truncation_is_a_stop_reason() -> None:
    rows = to_rows([sampled(ONE, status="truncated")], ids("a"), [0.5], filler_id=EOS)
    assert [row.stop_reason for row in rows] == ["length"]


def test_metrics_have_names_that_skyrl_averages() -> None:
    """It takes the mean of numbers with `mean` in their name, and adds up others."""
    made = log_entries([sampled(ONE), sampled(**FAILED)])
    assert all("mean" in name for name in made)
    assert (made["nemo_gym/mean/failed"], made["nemo_gym/mean/a/reward"]) == (0.5, 0.5)
    assert {f"nemo_gym/mean/{name}" for name in rollout_metrics(sampled(ONE))} <= made.keys()


def test_sampling_parameters_are_those_that_change_ids(caplog: pytest.LogCaptureFixture) -> None:
    """As SkyRL's `get_vllm_sampling_params` makes them."""
    given = {
        **{"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True},
        **{"max_tokens": 64, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1},
        "stop": None,
    }
    kept = {"max_tokens": 64, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    assert pinned_sampling(given) == kept
    assert not caplog.records
    assert pinned_sampling({**given, "bad_words": ["x"]}) == kept
    assert "bad_words" in caplog.text


def test_requests_name_the_model_and_the_salt_of_the_moment() -> None:
    salts: list[str | None] = ["model:1", None]
    engine = InferenceServersEngine("http://127.0.0.1:9", "model", lambda: salts.pop(0))
    assert engine.url == "http://127.0.0.1:9/inference/v1/generate"
    body = engine.request([1], {"temperature": 1.0}, "session")
    assert (body["token_ids"], body["model"], body["cache_salt"]) == ([1], "model", "model:1")
    assert "cache_salt" not in engine.request([1], {}, "session")


def config(**changes: Any) -> SimpleNamespace:
    engine = {"enable_return_routed_experts": False, "enable_return_sample_support_set": False}
    values = {"step_wise_trajectories": True, "type": None, **engine, **changes}
    return SimpleNamespace(
        generator=SimpleNamespace(
            step_wise_trajectories=values["step_wise_trajectories"],
            inference_engine=SimpleNamespace(**{name: values[name] for name in engine}),
        ),
        trainer=SimpleNamespace(
            algorithm=SimpleNamespace(dynamic_sampling=SimpleNamespace(type=values["type"]))
        ),
    )


def test_a_config_that_skyrl_would_train_wrongly_with_is_refused() -> None:
    check_config(config())
    wrong: list[dict[str, Any]] = [
        {"step_wise_trajectories": False},
        {"type": "filter"},
        {"enable_return_routed_experts": True},
        {"enable_return_sample_support_set": True},
    ]
    for changes in wrong:
        with pytest.raises(ConfigError, match="".join(f"{name}" for name in changes)):
            check_config(config(**changes))


def test_settings_describe_one_stack() -> None:
    settings = GeneratorSettings.model_validate(
        {"environments": "mcqa", "renderer": "qwen3", "limits": {"max_calls": 5}}
    )
    assert [environment.name for environment in settings.stack.environments] == ["mcqa"]
    assert (settings.limits.timeout_s, settings.limits.max_calls) == (1800, 5)
    assert dict(settings.renderer or ()) == {"name": "qwen3"}


def test_rows_are_items_of_skyrls_data_loader(tmp_path: Path) -> None:
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"say {n}"}], "top_k": 5},
            "agent_ref": {"name": f"agent_{n}"},
            "expected": {"nested": [n, None]},
        }
        for n in range(2)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    dataset = NeMoGymDataset([str(path)])
    assert len(dataset) == 2
    copy = pickle.loads(pickle.dumps(dataset))
    prompt, name, columns, uid = copy[1]
    assert (prompt, name, uid) == ([{"role": "user", "content": "say 1"}], "agent_1", "1")
    assert (columns["data_source"], columns["environment"]) == ("agent_1", "")
    assert json.loads(columns["nemo_gym_row"]) == rows[1]
    assert [item["uid"] for item in dataset.collate_fn([dataset[0], dataset[1]])] == ["0", "1"]
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(ConfigError, match="JSONL"):
        NeMoGymDataset([])
