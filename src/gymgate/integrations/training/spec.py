"""Settings that the trainers' integrations share."""

from __future__ import annotations

from gymgate.collection.spec import RolloutSpec


class TrainingSpec(RolloutSpec):
    """Environments of a training, bounds on each rollout, and what is trained on."""

    score_truncated: bool = False
    """Train on rollouts that a limit ended, with the reward they got; by default they are left out."""
