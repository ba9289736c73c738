"""TRL: datasets, rollout function and reward function for `GRPOTrainer`."""
