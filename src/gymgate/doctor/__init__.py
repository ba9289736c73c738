"""Checks before a run or a training: this machine, package versions, servers, the renderer, and a rollout of each agent."""
