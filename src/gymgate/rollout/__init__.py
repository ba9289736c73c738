"""The rollout record and how a row becomes one."""

from gymgate.rollout.outcome import Outcome, outcome_of
from gymgate.rollout.record import (
    ModelCall,
    Rollout,
    RolloutError,
    RolloutStatus,
    Segment,
    Timing,
    Usage,
)

__all__ = [
    "ModelCall",
    "Outcome",
    "Rollout",
    "RolloutError",
    "RolloutStatus",
    "Segment",
    "Timing",
    "Usage",
    "outcome_of",
]
