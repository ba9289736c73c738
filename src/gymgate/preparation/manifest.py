"""What was prepared, and of what: `manifest.json` beside the files."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Noted(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SourceNote(_Noted):
    """One dataset, script or file that rows came from."""

    name: str
    rows: int
    bad: int
    """Rows that cannot run and were left out."""
    origin: dict[str, Any]
    """`kind`: huggingface (repository, file or split, commit), script (path, its sha256, arguments), packaged or
    file; and the sha256 of what was fetched."""
    agent: str | None
    """Agent instance that its rows go to; `None`: the one that each row names, else the config's first."""
    repeats: int
    """How often NeMo Gym's own evaluation runs each row (`num_repeats`); the rows are not repeated here."""
    prompt: str | None
    """Prompt file that the rows were put to."""


class FileNote(_Noted):
    """One file of rows."""

    rows: int
    distinct: int
    """Rows that differ."""
    agents: dict[str, int]
    """Rows by agent."""
    sha256: str
    sources: tuple[SourceNote, ...]


class Manifest(_Noted):
    """The content of `manifest.json`."""

    environment: str
    """By which `gymgate run` and all others find it."""
    config: str
    nemo_gym: str
    gymgate: str
    files: dict[str, FileNote]
    """By name."""
