"""Reads any number of runs and shards as one, and says what is there twice, what is missing, what does not mix."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gymgate.core.errors import ConfigError, DataError
from gymgate.runs.costs import tokens_of_line
from gymgate.runs.gym_rollouts import read_gym_failures, stored_lines
from gymgate.runs.plan import Identity, IdentitySet
from gymgate.runs.record import LineReader, identity_of, line_error
from gymgate.runs.settings import context_overflow_of, differences
from gymgate.runs.store import FAILURES, ROLLOUTS, RUN, read_planned, read_run, run_directories
from gymgate.runs.tasks import CollectedTasks

RowName = tuple[Path, str, int]
"""A row of a run, shards together: the run's path, row key and occurrence."""


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


class Reading:
    """How far a run has been read, and what of its plan was there."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lines = LineReader(run.path if run.path.is_file() else run.path / ROLLOUTS)
        self.planned = read_planned(run.path, run.extent) if run.extent else None
        self.there, self.strange, self.twice = IdentitySet(), IdentitySet(), IdentitySet()
        """Rollouts of the plan, others, and those that an earlier line or run has too."""
        self.also_in: Path | None = None
        """The run that has the first of `twice`."""

    def rollouts(self) -> Iterator[tuple[str, Identity, dict[str, Any]]]:
        """Yield the next finished rollouts with environment and identity."""
        of_file = self.lines.path == self.run.path
        for line, value in stored_lines(self.lines) if of_file else self.lines.values():
            try:
                environment, identity = str(value.get("environment", "")), identity_of(value)
            except ValueError as error:
                raise line_error(self.lines.path, line, error) from error
            planned = self.planned is None or identity in self.planned
            (self.there if planned else self.strange).add(identity)
            yield environment, identity, value


class Runs:
    """Runs read as one, each rollout once: what every table, report and export is made of."""

    def __init__(self, paths: Iterable[Path], *, first_of_overlap: bool = False) -> None:
        """Find the runs at `paths`, directories (shards included) and files of rollouts that NeMo Gym collected.

        A rollout that is in two runs is refused, or taken from the first one (`first_of_overlap`). Raises `DataError` if no
        path holds a run, and `ConfigError` for runs of different policies.
        """
        self.given = list(paths)
        self.runs: list[Run] = []
        self._without: list[str] = []
        for path in self.given:
            found = runs_at(path)
            if not found:
                self._without.append(f"{path} holds no run: neither it nor a shard in it has a {RUN}")
            for run in found:
                self._add(run)
        if not self.runs:
            raise DataError(self._without[0], path=str(self.given[0]))
        self.missing: list[str] = []
        """Notes on runs, shards and rollouts that are missing; complete after `rollouts`."""
        self.lost: list[str] = []
        """Notes on planned rollouts that failed permanently; complete after `rollouts`."""
        self.notes: list[str] = []
        """Notes on rollouts that are in two runs, or in a run but not in its plan; complete after `rollouts`."""
        self._first_of_overlap = first_of_overlap
        self._overlaps: list[str] = []
        self._finished: dict[str, IdentitySet] = defaultdict(IdentitySet)
        self._environments = self._rows_that_failed()
        """Environments of rows that failed, as their finished rollouts name them: a failure may not know it."""

    @property
    def _described(self) -> Run | None:
        """The first run that says which policy it had."""
        return next((run for run in self.runs if run.policy is not None), None)

    @property
    def policy(self) -> Mapping[str, Any] | None:
        """The policy of all runs; `None` for rollouts that NeMo Gym collected."""
        return None if self._described is None else self._described.policy

    @property
    def created(self) -> int | None:
        """Start of the first run, in seconds since 1970."""
        return None if self._described is None else self._described.created

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """Yield every finished rollout. Raises `ConfigError` at the end if some are in two runs."""
        self._finished = defaultdict(IdentitySet)
        self._clear_notes()
        for run in self.runs:
            reading = Reading(run)
            yield from self._unseen(reading)
            self._note(reading)
        self._note_whole()

    def _unseen(self, reading: Reading) -> Iterator[dict[str, Any]]:
        """Yield the next rollouts of a run, but for those that were read before."""
        for environment, identity, value in reading.rollouts():
            self._name_environment(row_name(reading.run, value), environment)
            if self._finished[environment].add(identity):
                yield value
            else:
                reading.also_in = reading.also_in or self._first_with(environment, identity)
                reading.twice.add(identity)

    def _clear_notes(self) -> None:
        self.missing, self.lost, self.notes, self._overlaps = [*self._without], [], [], []

    def _note(self, reading: Reading) -> None:
        """Note what a run lacks, and what it holds in addition to its plan."""
        run, there = reading.run, reading.there
        if reading.twice.first:
            self._overlaps.append(
                f"{len(reading.twice)} rollouts of {run.path} are in {reading.also_in} too ({reading.twice.first})"
            )
        if reading.strange.first:
            self.notes.append(
                f"{run.path}: {len(reading.strange)} rollouts are of rows, repeats or seeds that its last command left out, "
                f"and count too ({reading.strange.first})"
            )
        total = run.extent.get("rollouts")
        if not isinstance(total, int) or len(there) >= total:
            return
        lost = IdentitySet()
        for identity in map(identity_of, self._final_failures(run)):
            if identity not in there and (reading.planned is None or identity in reading.planned):
                lost.add(identity)
        if len(lost):
            self.lost.append(f"{run.path}: {len(lost)} of {total} rollouts failed")
        if gone := total - len(there) - len(lost):
            self.missing.append(f"{run.path}: {gone} of {total} rollouts are missing")

    def _note_whole(self) -> None:
        """Note missing shards and rollouts that are there twice; raise `ConfigError` for these, unless the first is taken."""
        self.missing += self._missing_shards()
        if self._overlaps and not self._first_of_overlap:
            raise ConfigError(
                f"{'; '.join(self._overlaps)}; leave one out, or take each from the first: --overlap first"
            )
        self.notes += (f"{overlap}; the first is taken" for overlap in self._overlaps)

    def failures(self) -> Iterator[dict[str, Any]]:
        """Yield the failure of every rollout that failed permanently and finished in no run; call it after `rollouts`."""
        failed: dict[str, IdentitySet] = defaultdict(IdentitySet)
        for run in self.runs:
            for value in self._final_failures(run):
                placed, identity = self._placed(run, value), identity_of(value)
                environment = placed["environment"]
                if identity not in self._finished[environment] and failed[environment].add(identity):
                    yield placed

    def failed_attempts(self) -> Iterator[dict[str, Any]]:
        """Yield every failed attempt."""
        for run in {run.path.resolve(): run for run in self.runs}.values():
            for value in failed_attempts(run.path):
                yield self._placed(run, value)

    def _placed(self, run: Run, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return a failed attempt with the environment of its row: one that reached none does not say it."""
        known = self._environments.get(row_name(run, value))
        return {**value, "environment": known or str(value.get("environment", ""))}

    def _rows_that_failed(self) -> dict[RowName, str]:
        return {row_name(run, value): "" for run in self.runs for value in failed_attempts(run.path)}

    def _name_environment(self, row: RowName, environment: str) -> None:
        if row in self._environments:
            self._environments[row] = environment

    def _final_failures(self, run: Run) -> Iterator[dict[str, Any]]:
        return (value for value in failed_attempts(run.path) if value.get("final"))

    def _add(self, run: Run) -> None:
        """Add a run. Raises `ConfigError` if its policy is another one, or if it scores context overflows otherwise."""
        first = self._described or run
        if run.policy is not None and (changed := differences(_deciding(first), _deciding(run))):
            raise ConfigError(
                f"{first.path} and {run.path} have different settings ({'; '.join(changed)}); read them separately, or "
                f"both with gymgate compare {shlex.quote(str(first.path))} {shlex.quote(str(run.path))}"
            )
        self.runs.append(run)

    def _first_with(self, environment: str, identity: Identity) -> Path:
        return next(
            run.path
            for run in self.runs
            if any(key[:2] == (environment, identity) for key in Reading(run).rollouts())
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
    runs: Runs,
    answer_key: str | None = None,
    see: Callable[[dict[str, Any]], None] = lambda _: None,
    see_attempt: Callable[[dict[str, Any]], None] = lambda _: None,
) -> CollectedTasks:
    """Read runs by task; the answer is in `answer_key`, else in the first known field.

    `see` gets the line of each rollout that finished, and then of each that failed permanently; `see_attempt` gets each failed
    attempt.
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
        see_attempt(attempt)
    note_gaps(runs, collected)
    return collected


def note_gaps(runs: Runs, collected: CollectedTasks) -> None:
    """Say in `collected` what is missing, lost or strange in its runs."""
    collected.missing, collected.lost = runs.missing, runs.lost
    collected.notes = [*runs.notes, *runs.lost, *runs.missing]
    if collected.not_numbers:
        collected.notes.append(
            f"{collected.not_numbers} rewards are not finite numbers (at most 1e100) and are counted as unscored"
        )


def refuse_empty(runs: Runs, collected: CollectedTasks) -> None:
    """Raise `DataError` for runs without a rollout, finished, failed or planned."""
    if not collected.tasks and not collected.missing:
        raise DataError(f"no rollouts in {', '.join(map(str, runs.given))}", path=str(runs.given[0]))


def _deciding(run: Run) -> dict[str, Any]:
    """Return the settings that runs which are read together must have in common."""
    return {"policy": run.policy, "context_overflow": context_overflow_of(run.settings)}


def runs_at(path: Path) -> list[Run]:
    """Return the run at a path and its shards, or the rollouts in a file; empty if there are none."""
    if path.is_file():
        return [Run(path, {}, None, {}, None)]
    return [_read_description(directory) for directory in run_directories(path)]


def _read_description(path: Path) -> Run:
    described = read_run(path)
    settings = described["settings"]
    policy = settings.get("policy")
    policy = policy if isinstance(policy, Mapping) else {"type": policy}
    return Run(path, settings, policy, described.get("extent") or {}, described.get("created"))


def failed_attempts(path: Path, reader: LineReader | None = None) -> Iterator[dict[str, Any]]:
    """Yield failed attempts in a run's directory, or those noted beside a file of rollouts that NeMo Gym collected."""
    if path.is_file():
        yield from read_gym_failures(path)
        return
    for line, value in (reader or LineReader(path / FAILURES)).values():
        try:
            identity_of(value)
        except ValueError as error:
            raise line_error(path / FAILURES, line, error) from error
        yield value


def row_name(run: Run, value: Mapping[str, Any]) -> RowName:
    """Return what a rollout's row is called within its run, whatever its environment is."""
    return run.whole, str(value["row_key"]), int(value.get("occurrence", 0))
