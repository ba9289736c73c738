"""The replay policy: recorded rollouts as a model that always says what it said."""

from gymgate.gateway.replay.conversation import Block, blocks_of, items_of
from gymgate.gateway.replay.index import Match, ReplayIndex, load_index
from gymgate.gateway.replay.recording import (
    Recording,
    Turn,
    pair_rows,
    recorded_rollout,
    recorded_rollouts,
    recorded_rows,
)

__all__ = [
    "Block",
    "Match",
    "Recording",
    "ReplayIndex",
    "Turn",
    "blocks_of",
    "items_of",
    "load_index",
    "pair_rows",
    "recorded_rollout",
    "recorded_rollouts",
    "recorded_rows",
]
