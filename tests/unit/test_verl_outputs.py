"""Rollouts as verl's agent-loop outputs, and figures on their way to its log: plain values, without verl."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate.core.errors import DataError, PolicyError, TokenDataError
from gymgate.integrations.training.rollouts import SampledRollout, environment_of, rollout_metrics
from gymgate.integrations.training.spec import weighted_reward
from gymgate.integrations.verl.outputs import fitting, reward_extra_info, to_outputs
from gymgate.integrations.verl.reports import log_entries, most_frequent, why_untrained
from gymgate.integrations.verl.worker import LoopConfig
from gymgate.rollouts import Rollout, RolloutError, Segment
from gymgate.stack import AgentInfo
from gymgate.tokens import TokenTurn, assemble, prefix_misses


def sampled(*turns: TokenTurn, environment: str = "a", **fields: Any) -> SampledRollout:
    rollout = Rollout(
        id="r", environment=environment, agent="agent", **{"status": "completed", "reward": 0.5, **fields}
    )
    return SampledRollout(rollout, assemble(turns), len(turns), prefix_misses(turns), [1])


def test_each_segment_is_an_output_with_the_rollouts_reward() -> None:
    """turn 1  p p S S      turn 2  p p S S t S      turn 3 (compacted)  q S"""
    made = to_outputs(
        sampled(
            TokenTurn([1, 2], [3, 4], [-0.1, -0.2], (5, 5)),
            TokenTurn([1, 2, 3, 4, 5], [6], [-0.3], (5, 6)),
            TokenTurn([9], [7], [-0.4], (6, 6)),
        ),
        0.5,
    )
    assert [output["prompt_ids"] for output in made] == [[1, 2], [9]]
    assert [output["response_ids"] for output in made] == [[3, 4, 5, 6], [7]]
    assert [output["response_mask"] for output in made] == [[1, 1, 0, 1], [1]]
    assert [output["response_logprobs"] for output in made] == [[-0.1, -0.2, 0.0, -0.3], [-0.4]]
    assert [output["reward_score"] for output in made] == [0.5, 0.5]
    steps = [[output["extra_fields"][f"{end}_global_steps"] for end in ("min", "max")] for output in made]
    assert steps == [[5, 6], [6, 6]]
    for output in made:
        assert output["extra_fields"]["reward_extra_info"]["segments"] == 2
        assert output["num_turns"] == 3


def test_what_a_server_does_not_say_stays_missing() -> None:
    (made,) = to_outputs(sampled(TokenTurn([1], [2])), 1.0)
    assert made["response_logprobs"] is None
    assert "min_global_steps" not in made["extra_fields"]


def test_a_sampled_id_without_a_logprob_among_others_is_not_given_one() -> None:
    mixed = sampled(TokenTurn([1], [2], [-0.1]), TokenTurn([1, 2, 3], [4]))
    with pytest.raises(TokenDataError, match="logprobs"):
        to_outputs(mixed, 1.0)


def test_extra_info_has_the_same_names_for_every_rollout() -> None:
    """verl's v0 batch takes the names of the first rollout for all."""
    one = sampled(TokenTurn([1], [2]))
    other = sampled(TokenTurn([1], [2]), reward=None, status="truncated", environment="b")
    assert reward_extra_info(one).keys() == reward_extra_info(other).keys()


def test_the_longest_segment_that_fits_stands_for_a_rollout() -> None:
    segments = [
        Segment(prompt_ids=[1] * 9, completion_ids=[1] * 5, mask=[1] * 5),
        Segment(prompt_ids=[1] * 2, completion_ids=[1] * 3, mask=[1, 0, 1]),
        Segment(prompt_ids=[1] * 2, completion_ids=[1] * 2, mask=[1, 0]),
    ]
    assert fitting(segments, 4, 4) is segments[1]
    assert fitting(segments, 9, 5) is segments[0]
    assert fitting(segments, 9, 4) is segments[1]
    assert fitting(segments, 2, 2) is segments[2]
    assert fitting(segments, 1, 1) is None


def test_figures_are_means_over_all_and_by_environment() -> None:
    error = RolloutError(kind="policy", message="out of memory", type="PolicyError")
    failed = sampled(environment="b", status="failed", reward=None, error=error)
    reports = [
        {"environment": "a", "metrics": rollout_metrics(sampled(TokenTurn([1], [2]))), "untrained": None},
        {"environment": "b", "metrics": rollout_metrics(failed), "untrained": why_untrained(failed)},
    ]
    made = log_entries(reports)
    assert made["nemo_gym/failed"] == 0.5
    assert (made["nemo_gym/a/failed"], made["nemo_gym/b/failed_policy"]) == (0.0, 1.0)
    assert made["nemo_gym/reward"] == made["nemo_gym/a/reward"] == 0.5
    assert "nemo_gym/b/reward" not in made
    found = most_frequent(reports)
    assert found is not None
    assert isinstance(found[0], PolicyError)
    assert (str(found[0]), found[1]) == ("policy: out of memory", 1)
    assert most_frequent(reports[:1]) is None


def test_why_a_rollout_is_not_trained_on() -> None:
    cut = sampled(TokenTurn([1], [2]), status="truncated")
    assert "score_truncated" in why_untrained(cut)["message"]
    assert "sampled nothing" in why_untrained(sampled(status="truncated"))["message"]
    masked = why_untrained(sampled(TokenTurn([1], [2]), status="masked"))["message"]
    assert "masked" in masked
    assert "0.5" in masked


def test_rewards_are_weighed_by_the_entry_and_a_missing_part_stays_missing() -> None:
    entry = LoopConfig.model_validate({"environments": "mcqa", "reward_parts": {"format": 0.5, "style": 2}})
    whole = sampled(TokenTurn([1], [2]), reward_parts={"format": 0.25, "style": 1.0})
    some = sampled(TokenTurn([1], [2]), reward_parts={"format": 0.25, "other": 9.0})
    assert weighted_reward(whole.rollout, 0.5, entry.weights) == 0.5 + 0.125 + 2
    assert weighted_reward(some.rollout, 0.5, entry.weights) == 0.5 + 0.125
    assert weighted_reward(some.rollout, None, entry.weights) is None
    assert weighted_reward(some.rollout, 0.5, {"reward": 0.0, "style": 1.0}) is None
    (output,) = to_outputs(some, 0.625, {"format": 0.25})
    extra = output["extra_fields"]["reward_extra_info"]
    assert extra["format"] == 0.25
    assert not {"style", "other", "reward/format", "reward/other"} & extra.keys()
    assert "its parts: format, other" in why_untrained(some)["message"]


def test_an_entry_describes_one_stack_per_machine() -> None:
    entry = LoopConfig.model_validate({"environments": "mcqa", "renderer": "qwen3"})
    assert dict(entry.renderer or ()) == {"name": "qwen3"}
    stack = entry.stack
    assert stack.share == "machine"
    assert [environment.name for environment in stack.environments] == ["mcqa"]
    more = LoopConfig.model_validate(
        {
            "environments": ["mcqa", {"name": "math_with_judge", "overrides": [["a.b", 1]]}],
            "stack": {"share": "process", "linger_s": 5, "models": {"judge": "policy"}},
        }
    ).stack
    assert (more.share, more.linger_s, more.models) == ("process", 5, (("judge", "policy"),))
    assert more.environments[1].overrides == (("a.b", 1),)


@pytest.mark.parametrize(
    "wrong", [{"stack": {"lingers": 1}}, {"environment": ["mcqa"]}, {"environments": []}]
)
def test_a_wrong_entry_is_refused_when_it_is_read(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lingers|environment"):
        LoopConfig.model_validate({"environments": ["mcqa"], **wrong})


def test_a_row_without_environment_goes_where_its_agent_is() -> None:
    agents = {name: AgentInfo(name[0], name, "simple_agent") for name in ("a_agent", "b_agent")}
    assert environment_of({"agent_ref": {"name": "b_agent"}}, agents) == "b"
    assert environment_of({}, {"a_agent": agents["a_agent"]}) == "a"
    with pytest.raises(DataError, match=r"'c'.*a_agent, b_agent"):
        environment_of({"agent_ref": {"name": "c"}}, agents)
    with pytest.raises(DataError, match="None"):
        environment_of({}, agents)
