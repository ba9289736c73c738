"""What to prepare, and what was prepared."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gymgate.core.config import Config, EnvironmentConfig, RuntimeConfig

DEFAULT_TOKEN_ENV = "HF_TOKEN"
"""The name that the hub's own library reads."""
Split = Literal["train", "validation", "benchmark", "example"]


def _once_each(renames: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    names = [old for old, _ in renames]
    if len({*names}) < len(names):
        raise ValueError("a field is renamed twice")
    return renames


class PrepareConfig(Config):
    """Which data to prepare, and how."""

    environment: EnvironmentConfig
    """Its config, agent and overrides count, as for a stack."""
    runtime: RuntimeConfig = RuntimeConfig()
    """nemo-gym release whose preparation is run."""
    splits: tuple[Split, ...] = ("train", "validation", "benchmark")
    """Kinds of declared datasets to prepare; each gets a file."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Arguments of the data's `prepare()`."""
    script: str | None = None
    """Script of the environment to run instead of what its config declares."""
    script_arguments: tuple[str, ...] = ()
    """The script's command line; without `script`, for the only script that the environment has."""
    input: str | None = None
    """Your own rows (JSONL or CSV) instead of the declared data."""
    rename: Annotated[tuple[tuple[str, str], ...], AfterValidator(_once_each)] = ()
    """Fields of the rows to rename, as the environment calls them: pairs of old and new name."""
    prompt: str | None = None
    """Prompt (YAML: `user`, `system`) to fill raw rows into; `None`: the declared one."""
    requirements: tuple[str, ...] = ()
    """Packages that a script needs and does not declare."""
    token_env: str = DEFAULT_TOKEN_ENV
    """Environment variable with the hub's token, passed on if it is set."""
    env_vars: tuple[str, ...] = ()
    """Names of further environment variables that a script may see."""
    skip_bad: bool = False
    """Leave out rows that cannot run, instead of failing."""
    refresh: bool = False
    """Fetch again what was fetched earlier."""
    timeout_s: float = Field(default=14400.0, gt=0)
    """Seconds for the whole preparation, without making a runtime."""


class _Note(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SourceNote(_Note):
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
    """Prompt file that the rows were filled into."""


class FileNote(_Note):
    """One file of rows."""

    rows: int
    distinct: int
    """Rows that differ."""
    agents: dict[str, int]
    """Rows by agent."""
    sha256: str
    sources: tuple[SourceNote, ...]


class Manifest(_Note):
    """The content of `manifest.json`, which lies beside the files."""

    environment: str
    """The name by which `gymgate run` and all other commands find it."""
    config: str
    nemo_gym: str
    gymgate: str
    files: dict[str, FileNote]
    """By name."""
