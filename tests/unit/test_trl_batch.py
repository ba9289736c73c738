"""TRL's columns from rollouts, and the way from a prompt back to its row: plain values, no torch."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.errors import ConfigError, DataError, PolicyError
from gymgate.integrations.training.rollouts import (
    MAX_FAILED_BATCHES,
    MIN_FAILED_GROUPS,
    PATIENCE_S,
    FailureGuard,
    SampledRollout,
    count_errors,
)
from gymgate.integrations.training.spec import weighted_reward
from gymgate.integrations.trl.batch import check_weights, nemo_gym_reward, to_batch
from gymgate.integrations.trl.dataset import ROW_KEY, locate
from gymgate.integrations.trl.spec import NeMoGymSpec
from gymgate.rollouts import Rollout, RolloutError
from gymgate.tokens import TokenTurn, assemble, prefix_misses

EOS = 9


def sampled(*turns: TokenTurn, **rollout: Any) -> SampledRollout:
    fields: dict[str, Any] = {"status": "completed", "reward": 1.0, **rollout}
    made = Rollout(id="r", environment="e", agent="a", **fields)
    shown = list(turns[0].prompt_ids) if turns else []
    return SampledRollout(made, assemble(turns), len(turns), prefix_misses(turns), shown)


def test_two_turns_are_one_row() -> None:
    batch = to_batch([sampled(TokenTurn([1], [2], [-0.1]), TokenTurn([1, 2, 7], [3], [-0.2]))], filler_id=EOS)
    assert batch["prompt_ids"] == [[1]]
    assert batch["completion_ids"] == [[2, 7, 3]]
    assert batch["env_mask"] == [[1, 0, 1]]
    assert batch["logprobs"] == [[-0.1, None, -0.2]]
    assert batch["env_reward"] == [1.0]


def test_a_failed_rollout_trains_nothing_and_scores_nothing() -> None:
    error = RolloutError(kind="policy", message="no route", type="PolicyError")
    batch = to_batch([sampled(status="failed", reward=None, error=error)], filler_id=EOS)
    assert (batch["completion_ids"], batch["env_mask"], batch["env_reward"]) == ([[EOS]], [[0]], [None])
    assert batch["logprobs"] == [[None]]


def test_a_masked_rollout_keeps_its_ids_and_trains_nothing() -> None:
    batch = to_batch([sampled(TokenTurn([1], [2], [-0.1]), status="masked")], filler_id=EOS)
    assert (batch["completion_ids"], batch["env_mask"], batch["env_reward"]) == ([[2]], [[0]], [None])


def test_of_several_segments_the_longest_stands_and_the_rest_is_reported() -> None:
    rollout = sampled(TokenTurn([1], [2]), TokenTurn([5], [6, 7, 8]))
    batch = to_batch([rollout], filler_id=EOS)
    assert batch["completion_ids"] == [[6, 7, 8]]
    assert batch["rollout_metrics"][0]["delivered_fraction"] == 0.75
    with_tool = sampled(TokenTurn([1], [2]), TokenTurn([1, 2, 3, 4], [5]))
    assert to_batch([with_tool], filler_id=EOS)["rollout_metrics"][0]["delivered_fraction"] == 1.0
    assert to_batch(
        [sampled(TokenTurn([1], [2, 3]), TokenTurn([5], [6]))], filler_id=EOS, segment_choice="last"
    )["completion_ids"] == [[6]]


def test_a_truncated_rollout_teaches_nothing_unless_told_to() -> None:
    cut = sampled(TokenTurn([1], [2], [-0.1]), status="truncated")
    batch = to_batch([cut], filler_id=EOS)
    assert (batch["env_mask"], batch["env_reward"]) == ([[0]], [None])
    assert batch["rollout_metrics"][0]["truncated"] == 1
    kept = to_batch([cut], filler_id=EOS, score_truncated=True)
    assert (kept["env_mask"], kept["env_reward"]) == ([[1]], [1.0])


def failed(message: str = "no route", *, retryable: bool = False) -> SampledRollout:
    return sampled(status="failed", reward=None, error=error_of(message, retryable=retryable))


def error_of(message: str = "no route", *, retryable: bool = False) -> RolloutError:
    return RolloutError(kind="policy", message=message, type="PolicyError", retryable=retryable)


def test_failures_are_counted() -> None:
    found = count_errors([error_of(), error_of(), error_of("other"), None])
    assert found == [(("PolicyError", "policy: no route"), 2), (("PolicyError", "policy: other"), 1)]


def test_batches_of_failures_only_end_the_training_with_the_reason() -> None:
    guard, bad = FailureGuard(), error_of()
    for batch in [[bad]] * (MAX_FAILED_BATCHES - 1) + [[bad, None]] + [[bad]] * (MAX_FAILED_BATCHES - 1):
        guard.check(batch, groups=5)
    with pytest.raises(PolicyError, match=r"\b3 batches.*no route"):
        guard.check([bad], groups=5)
    guard.check([bad], groups=5)  # another training counts anew


def test_unusable_rows_do_not_end_a_training_of_small_batches() -> None:
    """One group a batch, and one row of twenty cannot be used: of 200 trainings none ends."""
    chance, ended = random.Random(0), 0
    for _ in range(200):
        guard = FailureGuard()
        try:
            for _ in range(500):
                guard.check([error_of() if chance.random() < 0.05 else None] * 8)
        except PolicyError:
            ended += 1
    assert ended == 0
    guard = FailureGuard()
    for _ in range(MIN_FAILED_GROUPS - 1):
        guard.check([error_of()] * 8)
    with pytest.raises(PolicyError, match=r"\b8 batches .*\(64 rollouts"):
        guard.check([error_of()] * 8)


def test_a_server_that_restarts_does_not_end_the_training() -> None:
    """Its failures come in no time, hundreds of them; only after minutes of nothing else the training ends."""
    now = 1000.0
    guard, bad = FailureGuard(batch_size=16, clock=lambda: now), error_of(retryable=True)
    for _ in range(100):
        guard.check([bad] * 8)
    assert 0 < guard.pause_s <= 30
    guard.check([None, bad])
    assert guard.pause_s == 0
    guard.check([bad] * 8, groups=2)
    now += PATIENCE_S
    for _ in range(4):
        guard.check([bad] * 8, groups=2)
    with pytest.raises(PolicyError, match=r"\b3 batches .*\(48 rollouts, 300 s\).*no route"):
        guard.check([bad] * 8, groups=2)


def test_small_groups_make_a_batch_together() -> None:
    """Four failed groups of four are one batch of sixteen."""
    guard = FailureGuard(batch_size=16)
    for _ in range(4 * MAX_FAILED_BATCHES - 1):
        guard.check([error_of()] * 4)
    assert guard.pause_s == 0
    with pytest.raises(PolicyError, match=r"\b3 batches .*\(48 rollouts"):
        guard.check([error_of()] * 4)


def test_the_reward_function_passes_none_on_and_logs_each_rollout() -> None:
    """TRL divides the sum of what all ranks log by its count, so a rank with one rollout weighs as one."""
    logged: dict[str, list[float]] = {}
    made = to_batch([sampled(TokenTurn([1], [2], [-0.5])), failed(), failed()], filler_id=EOS)
    rewards = nemo_gym_reward(
        completions=[""] * 3,
        env_reward=made["env_reward"],
        rollout_metrics=made["rollout_metrics"],
        environment=["a", "b", "a"],
        log_metric=lambda name, value: logged.setdefault(name, []).append(value),
    )
    assert rewards == [1.0, None, None]
    assert (logged["nemo_gym/reward"], logged["nemo_gym/a/reward"]) == ([1.0], [1.0])
    assert logged["nemo_gym/a/turns"] == [1.0, 0.0]
    assert logged["nemo_gym/failed_policy"] == [0, 1, 1]
    assert (logged["nemo_gym/a/failed_policy"], logged["nemo_gym/b/failed_policy"]) == ([0, 1], [1])
    assert logged["nemo_gym/a/failed_timeout"] == [0, 0]


def test_parts_of_a_reward_are_reward_functions_and_a_missing_one_stays_missing() -> None:
    """A rollout without the part, one that failed, and one that is masked; the last two have no part either."""
    parts = {"format": 0.25, "unused": 3.0}
    rollouts = [
        sampled(TokenTurn([1], [2], [-0.1]), reward_parts=parts),
        sampled(TokenTurn([1], [3], [-0.1]), reward_parts={"unused": 3.0}),
        failed(),
        sampled(TokenTurn([1], [4], [-0.1]), status="masked", reward_parts=parts),
    ]
    spec = NeMoGymSpec("e", reward_parts={"format": 0.5})
    assert spec.reward_weights == [1.0, 0.5]
    own, part = spec.reward_funcs
    assert part.__name__ == pickle.loads(pickle.dumps(part)).__name__ == "format"
    made = to_batch(rollouts, filler_id=EOS, weights=spec.settings.weights)
    columns = {name: made[name] for name in ("env_reward", "reward_parts", "rollout_metrics")}
    assert own(completions=[""] * 4, **columns) == [1.0, 1.0, None, None]
    assert part(completions=[""] * 4, **columns) == [0.25, None, None, None]
    metrics = made["rollout_metrics"]
    assert [each.get("reward/format") for each in metrics] == [0.25, None, None, None]


def test_a_rollout_without_anything_that_weighs_is_left_out() -> None:
    weights = NeMoGymSpec("e", reward_parts={"format": 1.0, "reward": 0.0}).settings.weights
    assert weights == {"reward": 0.0, "format": 1.0}
    rollouts = [sampled(TokenTurn([1], [2], [-0.1]), reward_parts=parts) for parts in ({"format": 0.0}, {})]
    made = to_batch(rollouts, filler_id=EOS, weights=weights)
    assert (made["env_reward"], made["reward_parts"]) == ([1.0, None], [{"format": 0.0}, {}])
    assert made["env_mask"] == [[1], [0]]


def test_a_part_that_is_called_as_the_reward_does_not_replace_it() -> None:
    rollouts = [sampled(TokenTurn([1], [2], [-0.1]), reward_parts={"reward": 5.0})]
    assert to_batch(rollouts, filler_id=EOS)["env_reward"] == [1.0]
    assert weighted_reward(rollouts[0].rollout, 1.0, {"reward": 1.0}) == 1.0


def test_weights_that_the_trainer_does_not_have_are_refused() -> None:
    class Weights(list[float]):
        tolist = list.copy

    trainer = SimpleNamespace(reward_weights=Weights([1.0, 0.20000000298]))
    check_weights(trainer, [1.0, 0.2])
    check_weights(
        SimpleNamespace(reward_weights=Weights([1.0, 0.2, 7.0])), [1.0, 0.2]
    )  # and one of the user's
    with pytest.raises(ConfigError, match=r"reward_weights=spec\.reward_weights"):
        check_weights(trainer, [1.0, 0.3])


def test_a_prompt_leads_back_to_its_row() -> None:
    assert locate([{"role": "user", "content": "hi", ROW_KEY: "train:12"}]) == ("train", 12)
    with pytest.raises(DataError, match=ROW_KEY):
        locate([{"role": "user", "content": "hi"}])
    with pytest.raises(DataError, match=ROW_KEY):
        locate("hi")
