"""What a run keeps of each rollout, and the line of JSON that holds it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import ConfigDict

from gymgate.collection.plan import Identity, Job
from gymgate.dataset.jsonl import parse_line
from gymgate.errors import DataError
from gymgate.rollout import Rollout

_HEAD = re.compile(rb'\{"row_key":"([0-9a-f]{16})","occurrence":(\d+),"repeat":(\d+),"seed":(null|\d+),')
_READ = 1 << 20


class CollectedRollout(Rollout):
    """A rollout of a run: the record, and which of the run's rollouts it is. Fields of other versions are ignored."""

    model_config = ConfigDict(extra="ignore")

    row_key: str
    """16 hex digits of the row's content."""
    occurrence: int = 0
    """How many equal rows come before it in the input."""
    repeat: int = 0
    seed: int | None = None
    task: int = 0
    """Position of the row in the input."""
    source: str = ""
    line: int = 0
    attempt: int = 0
    """Failed attempts before this one."""
    finished: float = 0.0
    """Seconds since 1970."""

    @property
    def identity(self) -> Identity:
        """Which of the run's rollouts it is."""
        return Identity(self.row_key, self.occurrence, self.repeat, self.seed)


def collected(job: Job, rollout: Rollout, attempt: int) -> CollectedRollout:
    """A rollout that came out of a job."""
    return CollectedRollout.model_construct(
        **job.identity._asdict(),
        task=job.task,
        source=job.row.source,
        line=job.row.line,
        attempt=attempt,
        finished=round(time.time(), 3),
        **rollout.__dict__,
    )


def to_line(rollout: CollectedRollout) -> bytes:
    """One line; its identity comes first, so that a resume need not parse the rest."""
    head = {**rollout.identity._asdict()}
    body = rollout.model_dump(mode="json", exclude=set(head))
    body["calls"] = [
        {name: value for name, value in call.items() if value not in (None, {})} for call in body["calls"]
    ]
    return orjson.dumps({**head, **body}, option=orjson.OPT_APPEND_NEWLINE)


def failure_line(job: Job, rollout: Rollout, attempt: int, *, final: bool) -> bytes:
    """One failed attempt as a line."""
    assert rollout.error is not None
    value: dict[str, Any] = {
        **job.identity._asdict(),
        "task": job.task,
        "source": job.row.source,
        "line": job.row.line,
        "environment": rollout.environment,
        "agent": rollout.agent,
        "attempt": attempt,
        "final": final,
        "error": rollout.error.model_dump(),
        "seconds": round(rollout.timing.total_s, 3),
        "finished": round(time.time(), 3),
    }
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def identity_of(line: bytes) -> Identity:
    """Of a line of either file; `ValueError` if it has none."""
    if match := _HEAD.match(line):
        seed = None if match[4] == b"null" else int(match[4])
        return Identity(match[1].decode(), int(match[2]), int(match[3]), seed)
    value = parse_line(line)
    try:
        seed = value.get("seed")
        return Identity(
            str(value["row_key"]),
            int(value.get("occurrence", 0)),
            int(value["repeat"]),
            None if seed is None else int(seed),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a rollout of a run: it has no {error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines with their 1-based numbers; a torn last one, of a run that goes on or was killed, is left out."""
    try:
        with path.open("rb", buffering=_READ) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                if not line.isspace():
                    yield number, line
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", path=str(path)) from error


def read_values(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines as dicts with their numbers. Raises `DataError` with path and line."""
    for number, line in read_lines(path):
        try:
            yield number, parse_line(line)
        except ValueError as error:
            raise line_error(path, number, error) from error


def line_error(path: Path, line: int, reason: object) -> DataError:
    """`PATH:LINE: reason`, with both as attributes."""
    return DataError(f"{path}:{line}: {reason}", path=str(path), line=line)
