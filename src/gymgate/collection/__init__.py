"""Rollouts on disk: plan, run, resume, shard, aggregate, report.

async for rollout in gymgate.collect("mcqa", policy=endpoint, repeats=16, output="runs/x"):
    ...
"""

from gymgate.collection.plan import Identity, Job, Plan, Shard
from gymgate.collection.record import CollectedRollout
from gymgate.collection.run import Collection
from gymgate.collection.runner import Pace
from gymgate.collection.stream import collect
from gymgate.dataset import RowSource

__all__ = [
    "CollectedRollout",
    "Collection",
    "Identity",
    "Job",
    "Pace",
    "Plan",
    "RowSource",
    "Shard",
    "collect",
]
