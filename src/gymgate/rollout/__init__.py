"""The rollout record and how a row becomes one."""

from gymgate.rollout.record import (
    ModelCall,
    Rollout,
    RolloutError,
    RolloutStatus,
    Segment,
    Timing,
    Usage,
)

__all__ = ["ModelCall", "Rollout", "RolloutError", "RolloutStatus", "Segment", "Timing", "Usage"]
