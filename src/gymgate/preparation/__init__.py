"""Rows made ready to run: downloaded and prepared as NeMo Gym does it, checked, blended."""

from __future__ import annotations

from gymgate.preparation.blending import Blended, Part, blend_files, parse_part

__all__ = ["Blended", "Part", "blend_files", "parse_part"]
