"""What is looked at before a training: versions, servers, the renderer, and one rollout of each agent."""

from gymgate.doctor.training import Target, run_training_checks

__all__ = ["Target", "run_training_checks"]
