"""Rows made ready to run: downloaded and prepared as NeMo Gym does it, checked, blended."""

from __future__ import annotations

from gymgate.preparation.blending import Blended, Part, blend_files, parse_part
from gymgate.preparation.manifest import FileNote, Manifest, SourceNote
from gymgate.preparation.order import PrepareConfig
from gymgate.preparation.prepare import ScriptHelp, prepare

__all__ = [
    "Blended",
    "FileNote",
    "Manifest",
    "Part",
    "PrepareConfig",
    "ScriptHelp",
    "SourceNote",
    "blend_files",
    "parse_part",
    "prepare",
]
