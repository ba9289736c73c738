"""Stored rollouts as a run: each is played again through agent, tools and scoring, and its own recording is the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gymgate.core.config import ReplayEndpoint
from gymgate.core.errors import ConfigError, DataError, DivergedError
from gymgate.gateway.replay.recording import recorded_rollout
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts import Rollout, Row
from gymgate.rollouts.result import judge_failed, rollout_error
from gymgate.rollouts.row import TaskKey
from gymgate.runs.collected.run import Collection
from gymgate.runs.described.plan import WHOLE, Identity, IdentitySet, PlannedRollout, RolloutPlan, Shard
from gymgate.runs.described.settings import differences
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.gym_rollouts import TASK, failures_beside, inputs_beside, stored_attempts
from gymgate.runs.stored.layout import FAILURES, ROLLOUTS, read_run, run_directories, run_of_file, without_run
from gymgate.runs.stored.record import read_values
from gymgate.runs.stored.rows import RowReader
from gymgate.stack import Stack

_NOT_RECORDED = 422
"""Status of a call that a replay has no answer to."""
_OUTCOME = {"mask_sample", "failure_kind", "failure_reason"}
"""Fields of NeMo Gym's results that say what became of a rollout."""


class StoredRollout(NamedTuple):
    """Where a rollout is stored, and what ran it."""

    path: str
    position: int
    """0-based, among the lines of the file that are not blank."""
    environment: str
    agent: str


class StoredRow(NamedTuple):
    """A row of stored rollouts."""

    task: int
    source: str
    line: int
    agent: str
    first: StoredRollout


class StoredRun:
    """The rollouts of a run, or of a file of rollouts, that can be played again."""

    def __init__(self, path: Path, *, judge_failed_only: bool = False, datasets: Sequence[str] = ()) -> None:
        """Read a directory of `gymgate run` (shards included), or a rollouts.jsonl of its or of NeMo Gym's collector.

        Raises `DataError` for another path, for a malformed line, and if there is nothing to play.
        """
        self.path = path = run_of_file(path)
        self.judge_failed_only = judge_failed_only
        self.datasets = datasets
        """Those of its rows that may be loaded."""
        self.settings: Mapping[str, Any] = {}
        """Settings of the run; empty for a file."""
        self.created: int | None = None
        """Its start, in seconds since 1970: another run may take its place."""
        self.rollouts: dict[Identity, StoredRollout] = {}
        self.rows: dict[tuple[str, int], StoredRow] = {}
        """By row key and occurrence."""
        self.is_gym = False
        """Whether NeMo Gym's collector wrote it: environments are known by their agents."""
        self.silent = 0
        """Rollouts that were stored without what the policy said, or whose policy failed."""
        self.twice = 0
        """Rollouts that are there more than once; the first that finished is taken."""
        self._finished = IdentitySet()
        if path.is_file():
            files = [path, failures_beside(path)]
        else:
            directories = run_directories(path)
            if not directories:
                raise DataError(without_run(path), path=str(path))
            self._read_settings(directories)
            files = [directory / name for directory in directories for name in (ROLLOUTS, FAILURES)]
        for file in files:
            for position, attempt in enumerate(stored_attempts(file)):
                self._add(file, position, attempt)
        self._refuse_empty()

    @property
    def environments(self) -> list[str]:
        """Names of the environments, of NeMo Gym's files those of the agents."""
        return sorted({rollout.environment for rollout in self.rollouts.values()})

    def plan(self, shard: Shard = WHOLE) -> RolloutPlan:
        """Return the plan that plays each rollout once. Raises `DataError` if a file of rows has changed or is gone."""
        seeds = {identity.seed for identity in self.rollouts}
        if None in seeds and len(seeds) > 1:
            raise ConfigError(f"{self.path} holds rollouts with seeds and without; rescore them separately")
        only = IdentitySet()
        for identity in self.rollouts:
            only.add(identity)
        return RolloutPlan(
            [RowSource(_Rows(self))],
            repeats=1 + max(identity.repeat for identity in self.rollouts),
            seeds=None if None in seeds else sorted(seed for seed in seeds if seed is not None),
            shard=shard,
            only=only,
        )

    def _read_settings(self, directories: Sequence[Path]) -> None:
        first, *others = map(read_run, directories)
        self.settings, self.created = first["settings"], first.get("created")
        for directory, other in zip(directories[1:], others, strict=True):
            if changed := differences(self.settings, other["settings"]):
                raise ConfigError(
                    f"{directories[0]} and {directory} have other settings ({'; '.join(changed)}); rescore them separately"
                )

    def _add(self, file: Path, position: int, attempt: Attempt) -> None:
        identity = attempt.identity
        if attempt.error is None:
            if not self._finished.add(identity):
                self.twice += 1
                return
            self.rollouts.pop(identity, None)
        elif identity in self._finished:
            return
        if self.judge_failed_only and not _judge_failed(attempt):
            return
        if not _can_be_played(attempt):
            self.silent += attempt.final
            return
        stored = StoredRollout(str(file), position, attempt.environment, attempt.agent)
        self.is_gym |= attempt.source == str(file)
        self.rollouts[identity] = stored
        row = StoredRow(attempt.task, attempt.source, attempt.line, attempt.agent, stored)
        self.rows.setdefault((identity.row_key, identity.occurrence), row)

    def _refuse_empty(self) -> None:
        if self.rollouts:
            return
        if self.judge_failed_only:
            reason = "no rollout with a failed judge is stored with what its policy said; `gymgate run --bodies` keeps that"
        elif self.silent:
            reason = f"none of its {self.silent} rollouts is stored with what its policy said; `gymgate run --bodies` keeps that"
        else:
            reason = "there are no rollouts"
        raise DataError(f"{self.path}: {reason}", path=str(self.path))


MOST_EQUAL = 100_000
"""Equal rows of a run that are played again; each takes memory, stored or not."""


class _Rows(Sequence[Row]):
    """The rows of stored rollouts, in their order, read again from where they came from."""

    def __init__(self, stored: StoredRun) -> None:
        self.source = str(stored.path)
        rows = dict(stored.rows)
        for (key, occurrence), row in sorted(stored.rows.items()):
            if occurrence > MOST_EQUAL:
                raise DataError(
                    f"{stored.path}: a row {key} after {occurrence:,} equal ones; at most {MOST_EQUAL:,} are played again",
                    path=str(stored.path),
                )
            # A plan numbers equal rows from the first: the next stored one stands for one that is not.
            for earlier in range(occurrence):
                rows.setdefault((key, earlier), row)
        self._rows = sorted(rows.items(), key=lambda item: (item[1].task, item[0][1]))
        self._reader = RowReader(stored.datasets)
        self._inputs = _materialized(stored.path) if stored.is_gym else {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: Any) -> Any:
        (key, occurrence), row = self._rows[position]
        task = TaskKey(row.first.environment, key, occurrence)
        return Row(self._data(task, row), key, row.agent, row.source, row.line)

    def _data(self, task: TaskKey, row: StoredRow) -> dict[str, Any]:
        if row.source != row.first.path:
            return self._reader.read(row.source, task, row.line)
        data = self._inputs.get((row.agent, row.task))
        if data is None:  # NeMo Gym's results repeat their rows
            data = recorded_rollout([row.first.path], row.first.position).row
        return {name: value for name, value in data.items() if name[:4] != "_ng_" and name not in _OUTCOME}


@dataclass
class Rescoring(Collection):
    """A run that plays stored rollouts."""

    stored: StoredRun = field(kw_only=True)

    def settings(self) -> dict[str, Any]:
        stored = self.stored
        origin = {"run": str(stored.path.resolve()), "created": stored.created}
        origin["judge_failed_only"] = stored.judge_failed_only
        inherited = {name: stored.settings.get(name) for name in ("nemo_gym", "policy")}
        return {**super().settings(), "rescored": {**origin, **inherited}}

    async def _run_one(self, stack: Stack, planned: PlannedRollout) -> Rollout:
        stored = self.stored.rollouts[planned.identity]
        environment, agent = where_to_run(stored, stack)
        rollout = await stack.run(
            {name: value for name, value in planned.row.data.items() if name != "agent_ref"},
            policy=ReplayEndpoint(rollouts=(stored.path,), index=stored.position),
            environment=environment,
            agent=agent,
            limits=self.limits,
            record_bodies=self.record_bodies,
        )
        return as_recorded(rollout).model_copy(update={"environment": stored.environment})


def where_to_run(stored: StoredRollout, stack: Stack) -> tuple[str | None, str | None]:
    """Return the environment and agent that play a rollout: the stored ones, else those of the only environment.

    Raises `ConfigError` if the stack has neither.
    """
    configs = {stack.names[config.name]: config for config in stack.config.environments}
    only = next(iter(configs.values())) if len(configs) == 1 else None
    config = configs.get(stored.environment, only)
    info = stack.agents.get(stored.agent)
    if config is None and info is None:
        raise ConfigError(
            f"environment {stored.environment!r} with agent {stored.agent!r} is not in this stack; available: "
            f"{', '.join(sorted(configs))}"
        )
    if config is None:
        return None, stored.agent
    name = stack.names[config.name]
    same = info is not None and info.environment == name and config.agent is None
    return name, stored.agent if same else None


def as_recorded(rollout: Rollout) -> Rollout:
    """Return the rollout, or a failed one with a `DivergedError` if it did not go as it was recorded."""
    if (reason := _divergence(rollout)) is None:
        return rollout
    error = rollout_error(DivergedError(f"diverged {reason}", endpoint="replay", retryable=False))
    nothing: dict[str, Any] = {
        "status": "failed",
        "limit": None,
        "reward": None,
        "reward_parts": {},
        "metrics": {},
    }
    return rollout.model_copy(update={**nothing, "error": error, "result": None})


def _divergence(rollout: Rollout) -> str | None:
    """Return how a rollout left its recording; `None` if each call was asked as recorded and none is missing."""
    calls = rollout.policy_calls
    for number, call in enumerate(calls, 1):
        match = call.details.get("match")
        if match == "loose":
            return f"at call {number}: the environment said something else than recorded"
        if match is None and call.status_code == _NOT_RECORDED:
            return f"at call {number}: {(call.error or '').rpartition('; nearest is ')[2]}"
    played = max((call.details.get("turn", -1) for call in calls), default=-1) + 1
    turns = max((call.details.get("turns", 0) for call in calls), default=0)
    if rollout.error is None and played < turns:
        return f"after call {played}: the agent ended there, and {turns} calls are recorded"
    return None


def _judge_failed(attempt: Attempt) -> bool:
    """Whether a stored rollout failed because a judge did: its error is an endpoint's, and not that of the policy."""
    if judge_failed(attempt.result or {}):
        return True
    error = attempt.error
    return (
        error is not None
        and error.kind == "policy"
        and error.type != DivergedError.__name__
        and _policy_answered(attempt)
    )


def _can_be_played(attempt: Attempt) -> bool:
    """Whether what the policy said is stored, up to the rollout's end."""
    response = (attempt.result or {}).get("response")
    said = isinstance(response, Mapping) and bool(response.get("output"))
    said |= any(call.request and call.status_code == 200 for call in attempt.policy_calls or ())
    return said and (attempt.error is None or not attempt.policy_calls or _policy_answered(attempt))


def _policy_answered(attempt: Attempt) -> bool:
    calls = attempt.policy_calls or ()
    return bool(calls) and calls[-1].status_code == 200


def _materialized(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows that NeMo Gym's collector wrote beside its rollouts, by agent and task number."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for _, row in read_values(inputs_beside(path)):
        reference, task = row.get("agent_ref"), row.get(TASK)
        agent = str(reference.get("name") or "") if isinstance(reference, Mapping) else ""
        rows.setdefault((agent, task if isinstance(task, int) else -1), row)
    return rows
