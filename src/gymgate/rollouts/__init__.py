"""Rows and what becomes of them: rows read and blended, the record of a rollout, and what its outcome counts for."""

from __future__ import annotations

from gymgate.rollouts.mixture import blend
from gymgate.rollouts.outcome import Outcome, outcome_of
from gymgate.rollouts.record import ModelCall, Rollout, RolloutError, RolloutStatus, Segment, Timing, Usage
from gymgate.rollouts.row import Row, make_row, row_key
from gymgate.rollouts.rowfile import RowFile

__all__ = [
    "ModelCall",
    "Outcome",
    "Rollout",
    "RolloutError",
    "RolloutStatus",
    "Row",
    "RowFile",
    "Segment",
    "Timing",
    "Usage",
    "blend",
    "make_row",
    "outcome_of",
    "row_key",
]
