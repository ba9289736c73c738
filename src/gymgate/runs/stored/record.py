"""The record that a run keeps of each rollout, and the line of JSON that holds it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from gymgate.core import codec
from gymgate.core.errors import DataError
from gymgate.core.files import open_regular
from gymgate.rollouts import Rollout
from gymgate.rollouts.row import TaskKey
from gymgate.runs.described.plan import Identity, PlannedRollout
from gymgate.runs.stored.tokens import tokens_of
from gymgate.stack.description import resolved_source

_READ = 1 << 20
_PLANNED = set(Identity._fields)


class CollectedRollout(Rollout):
    """A rollout with its place in the run. Fields that other versions wrote are ignored."""

    model_config = ConfigDict(extra="ignore")

    row_key: str
    """16 hex digits of the row's content."""
    occurrence: int = 0
    """Number of equal rows before this one in the input."""
    repeat: int = 0
    seed: int | None = None
    task: int = 0
    """Position of the row in the input."""
    source: str = ""
    line: int = 0
    attempt: int = 0
    """Failed attempts before this one; of one that failed, itself included."""
    finished: float = 0.0
    """Seconds since 1970."""

    @property
    def identity(self) -> Identity:
        """Which of the run's rollouts it is."""
        return Identity(self.row_key, self.occurrence, self.repeat, self.seed)

    @property
    def task_key(self) -> TaskKey:
        """What it has in common with the other rollouts of its row."""
        return TaskKey(self.environment, self.row_key, self.occurrence)


def collected(planned: PlannedRollout, rollout: Rollout, attempt: int) -> CollectedRollout:
    """A rollout together with its place in the run."""
    return CollectedRollout.model_construct(
        **planned.identity._asdict(),
        task=planned.task,
        source=resolved_source(planned.row.source),
        line=planned.row.line,
        attempt=attempt,
        finished=round(time.time(), 3),
        **rollout.__dict__,
    )


def to_line(rollout: CollectedRollout) -> bytes:
    """One line."""
    body = rollout.model_dump(mode="json", exclude=_PLANNED)
    body["calls"] = _short(body["calls"])
    return codec.dumps({**rollout.identity._asdict(), **body}) + b"\n"


def failure_line(rollout: CollectedRollout, *, final: bool) -> bytes:
    """One failed attempt as a line; `final` if no further one follows. It then has the calls, if their bodies were kept."""
    is_kept = final and any(call.request is not None for call in rollout.calls)
    left_out = _PLANNED if is_kept else _PLANNED | {"result", "calls"}
    body = rollout.model_dump(mode="json", exclude=left_out)
    if is_kept:
        body["calls"] = _short(body["calls"])
    return (
        codec.dumps({**rollout.identity._asdict(), **body, "final": final, "usage": tokens_of(rollout)})
        + b"\n"
    )


def _short(calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return calls without the fields that say nothing."""
    return [{name: value for name, value in call.items() if value not in (None, {})} for call in calls]


def read_values(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the whole lines of a file as dicts with their 1-based numbers, nothing if there is no such file.

    Raises `DataError` with path and line. A torn last line, of a run under way or one that was killed, is left out; a whole
    object only lacks its line ending, which other programs may not write.
    """
    try:
        with open_regular(path, _READ) as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    value = codec.loads_object(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise line_error(path, number, error) from error
                yield number, value
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", path=str(path)) from error


def line_error(path: Path, line: int, reason: object) -> DataError:
    """`PATH:LINE: reason`, with both as attributes."""
    return DataError(f"{path}:{line}: {reason}", path=str(path), line=line)
