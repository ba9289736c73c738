"""`Attempt`: one line of a stored run, checked where it is read."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, ValidationError

from gymgate.core.config import POLICY, validation_message
from gymgate.core.errors import ErrorKind
from gymgate.rollouts.outcome import LARGEST
from gymgate.rollouts.record import RolloutStatus
from gymgate.rollouts.row import TaskKey
from gymgate.runs.described.plan import Identity
from gymgate.runs.stored.record import CollectedRollout, line_error
from gymgate.runs.stored.tokens import Name, Seconds, Stored, StoredCall, Text, Whole

RowKey = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{16}$")]
Figure = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST)]
"""What `number` takes of a result."""


def task_name(environment: str, line: int, occurrence: int) -> str:
    """Return `ENVIRONMENT:LINE` of a row's file, with `#2` and so on for further equal rows."""
    return f"{environment}:{line}{f'#{occurrence + 1}' if occurrence else ''}"


class StoredError(Stored):
    """Why an attempt failed. NeMo Gym has classes of failures that gymgate does not."""

    kind: Name = "unknown"
    type: Name = "unknown"
    message: Text = ""
    retryable: bool = False
    judge: bool = False


class StoredTiming(Stored):
    """Seconds."""

    total_s: Annotated[Seconds, Field(ge=0)] | None = None


class Attempt(Stored):
    """A rollout that finished, or a failed attempt at one. `None` is what its line does not say."""

    row_key: RowKey
    occurrence: Whole = 0
    repeat: Whole
    seed: Whole | None = None
    task: Whole = 0
    source: Text = ""
    line: Whole = 0
    """Line of the row in `source`."""
    environment: Name = ""
    agent: Name = ""
    attempt: Whole = 0
    status: RolloutStatus | None = None
    limit: Name | None = None
    """What cut a truncated rollout short."""
    reward: Any = None
    """As it is stored; a `Score` has what counts."""
    reward_parts: dict[Text, Figure] | None = None
    metrics: dict[Text, Figure] | None = None
    error: StoredError | None = None
    answer_found: bool | None = None
    final: bool = True
    """For a failed attempt: whether no further one followed."""
    result: dict[str, Any] | None = None
    calls: tuple[StoredCall, ...] | None = None
    usage: dict[Text, dict[Text, Whole | None] | None] | None = None
    """Tokens by model server; stored of failed attempts, whose calls are not."""
    timing: StoredTiming | None = None
    finished: Seconds | None = None
    """Seconds since 1970; before it, where a machine's clock was."""
    _line: tuple[Mapping[str, Any], Path, int] = PrivateAttr()
    """What it was read from: everything that the line holds, its file and number. No default, which would be copied for each
    of a million attempts."""

    @classmethod
    def read(cls, record: Mapping[str, Any], path: Path, number: int) -> Self:
        """Return the attempt in a line of a file. Raises `DataError` with path and line for a field of another form."""
        try:
            attempt = cls.model_validate(record)
        except ValidationError as error:
            raise line_error(path, number, _first_error(error)) from None
        attempt._line = record, path, number
        return attempt

    @property
    def identity(self) -> Identity:
        """Which of the run's rollouts it is."""
        return Identity(self.row_key, self.occurrence, self.repeat, self.seed)

    @property
    def task_key(self) -> TaskKey:
        return TaskKey(self.environment, self.row_key, self.occurrence)

    @property
    def has_failed(self) -> bool:
        return self.status == "failed" or self.error is not None

    @property
    def policy_calls(self) -> Sequence[StoredCall] | None:
        return None if self.calls is None else [call for call in self.calls if call.model_server == POLICY]

    def in_environment(self, environment: str) -> Self:
        """Return it as one of another environment."""
        return self.model_copy(update={"environment": environment})

    @property
    def path(self) -> Path:
        """The file that it was read from."""
        return self._line[1]

    @property
    def record(self) -> Mapping[str, Any]:
        """Everything that its line holds."""
        return self._line[0]

    def rollout(self) -> CollectedRollout:
        """Return the whole record. Raises `DataError` with path and line if a field has another form."""
        record, path, number = self._line
        fields = {
            "id": f"{self.row_key}-{self.occurrence}-{self.repeat}-{'' if self.seed is None else self.seed}",
            "status": "failed",
            "timing": {"total_s": record.get("seconds") or 0.0},
            **record,
            "environment": self.environment,
            "calls": record.get("calls") or (),
        }
        if self.error is not None and self.error.kind not in typing.get_args(ErrorKind):
            fields["error"] = {**self.error.model_dump(), "kind": "environment"}
        try:
            return CollectedRollout.model_validate({k: v for k, v in fields.items() if v is not None})
        except ValidationError as error:
            raise line_error(path, number, _first_error(error)) from None


def _first_error(error: ValidationError) -> str:
    return validation_message(error).partition("; ")[0][:300]
