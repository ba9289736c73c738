"""Rollouts on disk: plan, run, resume, shard, aggregate, export, report.

async for rollout in gymgate.collect("mcqa", policy=endpoint, repeats=16, output="runs/x"):
    ...
"""

from gymgate.collection.pace import Pace
from gymgate.collection.record import CollectedRollout
from gymgate.collection.stream import collect

__all__ = ["CollectedRollout", "Pace", "collect"]
