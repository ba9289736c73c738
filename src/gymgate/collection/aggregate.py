"""Reads any number of runs and shards as one, and says what is there twice, what is missing, what does not mix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gymgate.collection.costs import tokens_of_line
from gymgate.collection.gym_rollouts import read_gym_failures, read_gym_rollouts
from gymgate.collection.plan import Identity, IdentitySet
from gymgate.collection.record import identity_of, line_error, read_values
from gymgate.collection.settings import differences
from gymgate.collection.store import FAILURES, ROLLOUTS, RUN, read_planned, read_run, run_directories
from gymgate.collection.tasks import CollectedTasks
from gymgate.errors import ConfigError, DataError


class Run(NamedTuple):
    """A run or shard on disk, or a file of rollouts that NeMo Gym collected."""

    path: Path
    settings: Mapping[str, Any]
    """Empty for NeMo Gym's."""
    policy: Mapping[str, Any] | None
    """As in its settings; `None` for NeMo Gym's."""
    extent: Mapping[str, Any]
    created: int | None

    @property
    def shard(self) -> tuple[int, int]:
        """Index and count; (1, 1) for a whole run."""
        index, count = self.extent.get("shard") or (1, 1)
        return index, count

    @property
    def whole(self) -> Path:
        """The path of the whole run that a shard is a part of."""
        return self.path.parent if self.shard[1] > 1 else self.path


class Runs:
    """Runs read as one, each rollout once: what every table, report and export is made of."""

    def __init__(self, paths: Iterable[Path], *, first_of_overlap: bool = False) -> None:
        """Find the runs at `paths`, directories (shards included) and files of rollouts that NeMo Gym collected.

        A rollout that is in two runs is refused, or taken from the first one (`first_of_overlap`). Raises `DataError` if no
        path holds a run, and `ConfigError` for runs of different policies.
        """
        self.given = list(paths)
        found = {path: [path] if path.is_file() else run_directories(path) for path in self.given}
        self._without = [
            f"{path} holds no run: neither it nor a shard in it has a {RUN}"
            for path, runs in found.items()
            if not runs
        ]
        self.runs = [_read_description(run) for path in self.given for run in found[path]]
        if not self.runs:
            raise DataError(self._without[0], path=str(self.given[0]))
        described = [run for run in self.runs if run.policy is not None]
        self.policy = described[0].policy if described else None
        """The policy of all runs; `None` for rollouts that NeMo Gym collected."""
        self.created = described[0].created if described else None
        """Start of the first run, in seconds since 1970."""
        for run in described[1:]:
            if changed := differences({"policy": self.policy}, {"policy": run.policy}):
                raise ConfigError(
                    f"{described[0].path} and {run.path} have different policies ({'; '.join(changed)}); read them separately"
                )
        self.missing: list[str] = []
        """Notes on runs, shards and rollouts that are missing; complete after `rollouts`."""
        self.lost: list[str] = []
        """Notes on planned rollouts that failed permanently; complete after `rollouts`."""
        self.notes: list[str] = []
        """Notes on rollouts that are in two runs, or in a run but not in its plan; complete after `rollouts`."""
        self._first_of_overlap = first_of_overlap
        self._finished: dict[str, IdentitySet] = defaultdict(IdentitySet)
        self._environments = {_row(run, value): "" for run, value in self._final_failures()}
        """Environments of rows that failed, as their finished rollouts name them: a failure may not know it."""

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """Yield every finished rollout. Raises `ConfigError` at the end if some are in two runs."""
        self._finished = defaultdict(IdentitySet)
        self.missing, self.lost, self.notes = [*self._without], [], []
        overlaps = []
        for run in self.runs:
            planned = read_planned(run.path, run.extent) if run.extent else None
            there, strange, twice = IdentitySet(), IdentitySet(), IdentitySet()
            also_in: Path | None = None
            for environment, identity, value in _keyed_rollouts(run.path):
                (there if planned is None or identity in planned else strange).add(identity)
                if (row := _row(run, value)) in self._environments:
                    self._environments[row] = environment
                if self._finished[environment].add(identity):
                    yield value
                else:
                    also_in = also_in or self._first_with(environment, identity)
                    twice.add(identity)
            if twice.first:
                overlaps.append(f"{len(twice)} rollouts of {run.path} are in {also_in} too ({twice.first})")
            if strange.first:
                self.notes.append(
                    f"{run.path}: {len(strange)} rollouts are of rows, repeats or seeds that its last command left out, "
                    f"and count too ({strange.first})"
                )
            total = run.extent.get("rollouts")
            if isinstance(total, int) and len(there) < total:
                lost = IdentitySet()
                for value in _failed_attempts(run.path):
                    identity = identity_of(value)
                    if (
                        value.get("final")
                        and identity not in there
                        and (planned is None or identity in planned)
                    ):
                        lost.add(identity)
                if len(lost):
                    self.lost.append(f"{run.path}: {len(lost)} of {total} rollouts failed")
                if gone := total - len(there) - len(lost):
                    self.missing.append(f"{run.path}: {gone} of {total} rollouts are missing")
        self.missing += self._missing_shards()
        if overlaps and not self._first_of_overlap:
            raise ConfigError(
                f"{'; '.join(overlaps)}; leave one out, or take each from the first: --overlap first"
            )
        self.notes += (f"{overlap}; the first is taken" for overlap in overlaps)

    def failures(self) -> Iterator[dict[str, Any]]:
        """Yield the failure of every rollout that failed permanently and finished in no run; call it after `rollouts`."""
        failed: dict[str, IdentitySet] = defaultdict(IdentitySet)
        for run, value in self._final_failures():
            environment = self._environments.get(_row(run, value)) or str(value.get("environment", ""))
            identity = identity_of(value)
            if identity not in self._finished[environment] and failed[environment].add(identity):
                yield {**value, "environment": environment}

    def failed_attempts(self) -> Iterator[dict[str, Any]]:
        """Yield every failed attempt."""
        for run in {run.path.resolve(): run for run in self.runs}.values():
            for value in _failed_attempts(run.path):
                known = self._environments.get(_row(run, value))
                yield {**value, "environment": known or str(value.get("environment", ""))}

    def _final_failures(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        for run in self.runs:
            yield from ((run, value) for value in _failed_attempts(run.path) if value.get("final"))

    def _first_with(self, environment: str, identity: Identity) -> Path:
        return next(
            run.path
            for run in self.runs
            if any(key[:2] == (environment, identity) for key in _keyed_rollouts(run.path))
        )

    def _missing_shards(self) -> Iterator[str]:
        shards: dict[tuple[Path, int], set[int]] = {}
        for run in self.runs:
            index, count = run.shard
            shards.setdefault((run.whole, count), set()).add(index)
        for (path, count), there in shards.items():
            if absent := sorted({*range(1, count + 1)} - there):
                yield f"{path}: shards {', '.join(map(str, absent))} of {count} are missing"


def read_runs(
    paths: Iterable[Path], *, answer_key: str | None = None, first_of_overlap: bool = False
) -> CollectedTasks:
    """Read the runs at `paths` by task. Raises as `Runs` does."""
    return read_tasks(Runs(paths, first_of_overlap=first_of_overlap), answer_key)


def read_tasks(
    runs: Runs, answer_key: str | None = None, see: Callable[[dict[str, Any]], None] = lambda _: None
) -> CollectedTasks:
    """Read runs by task; the answer is in `answer_key`, else in the first known field.

    `see` gets the line of each rollout that finished, and then of each that failed permanently.
    """
    collected = CollectedTasks(policy=runs.policy, created=runs.created)
    for value in runs.rollouts():
        collected.add(value, answer_key)
        see(value)
    for value in runs.failures():
        collected.task_of(value).failed += 1
        see({"status": "failed", **value})
    for attempt in runs.failed_attempts():
        collected.usage.add(attempt["environment"], tokens_of_line(attempt))
    collected.missing, collected.lost = runs.missing, runs.lost
    collected.notes = [*runs.notes, *runs.lost, *runs.missing]
    if collected.not_numbers:
        collected.notes.append(
            f"{collected.not_numbers} rewards are not finite numbers and are counted as unscored"
        )
    return collected


def _read_description(path: Path) -> Run:
    if path.is_file():
        return Run(path, {}, None, {}, None)
    described = read_run(path)
    settings = described["settings"]
    policy = settings.get("policy")
    policy = policy if isinstance(policy, Mapping) else {"type": policy}
    return Run(path, settings, policy, described.get("extent") or {}, described.get("created"))


def _keyed_rollouts(path: Path) -> Iterator[tuple[str, Identity, dict[str, Any]]]:
    """Yield finished rollouts with environment and identity."""
    if path.is_file():
        for value in read_gym_rollouts(path):
            yield value["environment"], identity_of(value), value
        return
    for line, value in read_values(path / ROLLOUTS):
        try:
            yield str(value.get("environment", "")), identity_of(value), value
        except ValueError as error:
            raise line_error(path / ROLLOUTS, line, error) from error


def _failed_attempts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield failed attempts in a run's directory, or those noted beside a file of rollouts that NeMo Gym collected."""
    if path.is_file():
        yield from read_gym_failures(path)
        return
    for line, value in read_values(path / FAILURES):
        try:
            identity_of(value)
        except ValueError as error:
            raise line_error(path / FAILURES, line, error) from error
        yield value


def _row(run: Run, value: Mapping[str, Any]) -> tuple[Path, str, int]:
    """Names a rollout's row within its run, whatever its environment is called."""
    return run.whole, str(value["row_key"]), int(value.get("occurrence", 0))
