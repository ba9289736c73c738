"""Rows made ready to run: downloaded and prepared as NeMo Gym does it, checked, blended."""

from __future__ import annotations

from gymgate.gym.preparation.blending import BlendFile, BlendResult, blend_files, parse_blend_file
from gymgate.gym.preparation.manifest import FileNote, Manifest, PrepareConfig, SourceNote
from gymgate.gym.preparation.prepare import ScriptHelp, prepare_data

__all__ = [
    "BlendFile",
    "BlendResult",
    "FileNote",
    "Manifest",
    "PrepareConfig",
    "ScriptHelp",
    "SourceNote",
    "blend_files",
    "parse_blend_file",
    "prepare_data",
]
