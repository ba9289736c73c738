"""Settings that the trainers' integrations share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from gymgate.core.config import PAIRS, RolloutLimits, Settings, short_for
from gymgate.rollouts import Rollout
from gymgate.runs.described.spec import RolloutSpec

REWARD = "reward"
"""Name of the environment's own reward beside its parts."""


class TrainingSpec(RolloutSpec):
    """Environments of a training, bounds on each rollout, and what is trained on."""

    score_truncated: bool = False
    """Train on rollouts that a limit ended, with the reward they got; by default they are left out."""
    reward_parts: Annotated[tuple[tuple[str, float], ...], PAIRS] = ()
    """Weights of the parts of a reward, as the environment calls them: `{format: 0.2}`. `reward` is the environment's own
    reward, of weight 1 unless set. A part that a rollout does not have stays missing."""

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the environment's own reward, which comes first, and of the parts."""
        return {REWARD: 1.0, **dict(self.reward_parts)}


class TokenSpec(TrainingSpec):
    """`TrainingSpec` of a trainer whose own servers sample token ids."""

    limits: RolloutLimits = RolloutLimits(timeout_s=1800)
    """Bounds on each rollout. Those that are not set keep this default."""
    renderer: Annotated[Settings | None, short_for("name")] = None
    """Config of the `renderers` package (`{name: qwen3}`), or only its name. `None`: by the model's hub name; a model in a
    directory needs one."""


def weighted_reward(rollout: Rollout, reward: float | None, weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of `reward`, which is the one to count, and of the rollout's parts.

    `None` without a reward to count, and if the rollout has nothing that has a weight.
    """
    if reward is None:
        return None
    values = {**rollout.reward_parts, REWARD: reward}
    weighted = [weight * values[name] for name, weight in weights.items() if weight and name in values]
    return sum(weighted) if weighted else None
