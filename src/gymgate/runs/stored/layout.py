"""The files of a run's directory, and what describes the run.

run.json          settings, which a resume must share, and extent, which may grow
rows.txt          the key of each row of the extent, a line each
rollouts.jsonl    a line per finished rollout
failures.jsonl    a line per failed attempt
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from gymgate.core import codec
from gymgate.core.config import validation_message
from gymgate.core.errors import DataError
from gymgate.core.files import open_regular, read_whole
from gymgate.runs.described.plan import PlannedIdentities
from gymgate.runs.stored.record import line_error
from gymgate.runs.stored.tokens import Seconds, Text, Whole

RUN, ROWS, ROLLOUTS, FAILURES = "run.json", "rows.txt", "rollouts.jsonl", "failures.jsonl"
TRACES = "traces.jsonl"
"""What verifiers writes in its place."""
FORMAT = 1
_KEY = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"shard-([0-9]+)-of-([0-9]+)")


class _Environment(BaseModel):
    name: Text
    overrides: dict[str, Any] | list[tuple[str, Any]] | str = {}


class _Settings(BaseModel):
    """The settings that are read by name; others are only shown and compared."""

    nemo_gym: Text | None = None
    sources: list[Text] = []
    environments: list[_Environment] = []
    judges: dict[str, dict[str, Any] | str] = {}
    policy: dict[str, Any] | str | None = None
    limits: dict[str, Any] = {}


class Extent(BaseModel):
    """Which rollouts a run consists of."""

    rollouts: Whole | None = None
    rows: Whole | None = None
    repeats: Whole = 1
    seeds: list[Whole] | None = None
    shard: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (1, 1)


class _Run(BaseModel):
    format: Literal[1]
    settings: _Settings
    extent: Extent | None = None
    created: Seconds | None = None


def read_run(path: Path) -> dict[str, Any]:
    """The content of a directory's `run.json`. Raises `DataError` if there is none or it has another format."""
    try:
        with open_regular(path / RUN) as file:
            value = codec.loads(read_whole(file))
    except FileNotFoundError as error:
        raise DataError(f"{path} holds no run: it has no {RUN}", path=str(path)) from error
    except OSError as error:
        raise DataError(f"cannot read {path / RUN}: {error.strerror}", path=str(path / RUN)) from error
    except ValueError as error:
        raise DataError(f"{path / RUN} is not JSON: {error}", path=str(path / RUN)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT or "settings" not in value:
        raise DataError(
            f"{path / RUN} was not written by gymgate, or by a release that wrote runs in another form",
            path=str(path / RUN),
        )
    try:
        _Run.model_validate(value)
    except ValidationError as error:
        reason = validation_message(error).partition("; ")[0]
        raise DataError(f"{path / RUN}: {reason}", path=str(path / RUN)) from None
    return value


def read_row_keys(path: Path) -> list[str] | None:
    """Return the keys of a run's rows; `None` if its directory does not list them. Raises `DataError`."""
    try:
        with open_regular(path / ROWS) as file:
            return read_whole(file).decode(errors="replace").split()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path / ROWS}: {error.strerror}", path=str(path / ROWS)) from error


def read_planned(path: Path, extent: Extent) -> PlannedIdentities | None:
    """Return the rollouts that a run consists of, by its extent; `None` if its directory does not list the rows.

    Raises `DataError` for a file that cannot be read and, with its line, for a key of another form.
    """
    if (keys := read_row_keys(path)) is None:
        return None
    for number, key in enumerate(keys, 1):
        if _KEY.fullmatch(key) is None:
            raise line_error(path / ROWS, number, "not the key of a row")  # a link may lead to anything
    return PlannedIdentities(keys, extent.model_dump())


def holds_traces(path: Path) -> bool:
    """Whether a path is verifiers' traces, or a directory with those of one or of several evals."""
    return (path.name == TRACES and path.is_file()) or any(
        any(path.glob(name)) for name in (TRACES, f"*/{TRACES}")
    )


def without_run(path: Path) -> str:
    """Say that a directory and its shards hold no run, and what it holds if verifiers wrote it."""
    if holds_traces(path):
        verb = "is" if path.name == TRACES else "holds"
        return f"{path} {verb} verifiers' traces, which docs/verifiers.md says how to read; `gymgate run -o DIR` writes a run"
    return f"{path} holds no run: neither it nor a shard in it has a {RUN}"


def run_of_file(path: Path) -> Path:
    """Return the directory of the run whose file of rollouts lies at a path; any other path as it is, a link followed.

    A link that the user names may lead anywhere, one in a run's directory nowhere.
    """
    if path.name == ROLLOUTS and (path.parent / RUN).exists():
        return path.parent
    return path.resolve() if path.is_symlink() and path.is_file() else path


def run_directories(path: Path) -> list[Path]:
    """The directory itself if it holds a run, then its shards in order; not copies of shards under other names."""
    shards = [
        ((int(name[1]), int(name[2])), file.parent)
        for file in path.glob(f"shard-*-of-*/{RUN}")
        if (name := _SHARD.fullmatch(file.parent.name)) is not None
    ]
    own = [path] if (path / RUN).exists() else []
    return own + [shard for _, shard in sorted(shards)]
