"""What each kind of rollout counts for: the table in docs/outcomes.md is the specification, and is read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from gymgate.core.errors import ErrorKind
from gymgate.rollouts import ModelCall, Rollout, RolloutError, outcome_of
from gymgate.rollouts.record import has_policy_call

DOCS = Path(__file__).parents[2] / "docs" / "outcomes.md"
HEAD = "| rollout | scored | in means | trained on | retried | reason |"
WORDS = {"yes": True, "no": False}


def error(kind: str, **fields: Any) -> dict[str, Any]:
    described = RolloutError(kind=kind, message="m", type="t", **fields)  # type: ignore[arg-type]
    return {"status": "failed", "error": described}


ROLLOUTS: dict[str, dict[str, Any]] = {
    "completed": {"status": "completed", "reward": 0.5},
    "truncated": {"status": "truncated", "reward": 0.5},
    "truncated by the policy's context length": {
        "status": "truncated",
        "limit": "context_length",
        "reward": 0.5,
    },
    "truncated, the trainer's `score_truncated` set": {"status": "truncated", "reward": 0.5},
    "completed or truncated, without a reward": {"status": "truncated"},
    "masked by Gym": {"status": "masked", "reward": 0.5},
    "failed: infrastructure": error("infrastructure", retryable=True),
    "failed: timeout": error("timeout", retryable=True),
    "failed: environment": error("environment"),
    "failed: environment, and it says that another attempt would fail too": error(
        "environment", terminal=True
    ),
    "failed: its judge failed": error("policy", retryable=True),
    "failed: its agent reports that it broke down": error("environment"),
    "failed: it never asked its policy": error("environment"),
    "failed: data": error("data"),
    "failed: temporary error of the policy's endpoint": error("policy", retryable=True),
    "failed: permanent error of the policy's endpoint": error("policy", retryable=False),
}
"""By the first cell of its line."""


def table() -> dict[str, list[str]]:
    lines = iter(DOCS.read_text().splitlines())
    assert HEAD in lines, "docs/outcomes.md has no table of outcomes"
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = cells
    return found


def test_the_table_has_every_rollout() -> None:
    assert table().keys() == ROLLOUTS.keys()
    kinds = {each["error"].kind for each in ROLLOUTS.values() if "error" in each}
    assert kinds == {*get_args(ErrorKind)}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_rollout_counts_for_what_the_table_says(name: str) -> None:
    scored, counted, trained, retried, reason = table()[name]
    made = Rollout(id="r", environment="e", agent="a", **ROLLOUTS[name])
    option = "score_truncated" in name
    for form in (made, made.model_dump(mode="json"), made.model_dump(mode="json", exclude_none=True)):
        result = outcome_of(form, score_truncated=option)
        assert (result.scored, result.counted) == (WORDS[scored], WORDS[counted])
        assert (result.trained, result.retryable) == (WORDS[trained], WORDS[retried])
        assert result.reason == reason
        assert result.reward == (0.5 if result.counted else None)
        assert result.training_reward == (0.5 if result.trained else None)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "1.0"])
@pytest.mark.parametrize("status", ["completed", "truncated", None])
def test_what_is_no_number_is_unscored(reward: Any, status: str | None) -> None:
    result = outcome_of({"status": status, "reward": reward}, score_truncated=True)
    assert (result.reason, result.reward, result.training_reward) == ("unscored", None, None)


def test_a_reward_beside_a_failure_is_no_reward() -> None:
    value = {"status": "completed", "reward": 1.0, "error": {"kind": "policy"}}
    assert (outcome_of(value).reason, outcome_of(value).reward) == ("failed", None)


def test_means_are_over_what_counts() -> None:
    counted = [reward for each in ROLLOUTS.values() if (reward := outcome_of(each).reward) is not None]
    assert counted == [0.5, 0.5, 0.5, 0.5]


def test_a_judges_call_is_no_call_of_the_policy() -> None:
    judge = ModelCall(index=0, model_server="judge", dialect="chat")
    policy = ModelCall(index=1, dialect="chat")
    assert not has_policy_call([])
    assert not has_policy_call([judge])
    assert has_policy_call([judge, policy])
