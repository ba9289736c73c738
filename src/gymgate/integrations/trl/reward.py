"""TRL's reward function for NeMo Gym: the reward is already there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymgate.integrations.training.figures import means


def nemo_gym_reward(
    completions: list[Any],
    env_reward: list[float | None],
    rollout_metrics: list[dict[str, float]],
    environment: list[str] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """The reward that NeMo Gym gave each rollout; `None` (unscorable to TRL) where it gave none.

    Figures go to the trainer's own log as `nemo_gym/NAME` and `nemo_gym/ENVIRONMENT/NAME`.
    """
    if log_metric is not None:
        for name, value in means(rollout_metrics, environment or [""] * len(completions)).items():
            log_metric(f"nemo_gym/{name}", value)
    return list(env_reward)
