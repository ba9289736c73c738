"""The replay policy: recorded rollouts as a model that always says what it said."""
