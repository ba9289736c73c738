"""TRL: datasets, rollout function and reward function for `GRPOTrainer`."""

from gymgate.integrations.trl.spec import NeMoGymSpec

__all__ = ["NeMoGymSpec"]
