"""Rollouts on disk: plan, run, resume, shard, aggregate.

async for rollout in gymgate.collect("mcqa", policy=endpoint, repeats=16, output="runs/x"):
    ...
"""
