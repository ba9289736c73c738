"""Reads any number of runs and shards as one, and notes duplicates, gaps, and runs that do not mix."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from gymgate.core.errors import ConfigError, DataError
from gymgate.runs.attempts import Attempt
from gymgate.runs.gym_rollouts import read_gym_failures, stored_attempts
from gymgate.runs.layout import (
    FAILURES,
    ROLLOUTS,
    RUN,
    Extent,
    read_planned,
    read_run,
    run_directories,
    run_of_file,
)
from gymgate.runs.plan import IdentitySet
from gymgate.runs.settings import context_overflow_of, differences, is_example
from gymgate.runs.tasks import CollectedTasks

_NAMED = 100
"""Missing shards that a note names."""
RowName = tuple[Path, str, int]
"""A row of a run, shards together: the run's path, row key and occurrence."""


class Run(NamedTuple):
    """A run or shard on disk, or a file of rollouts that NeMo Gym collected."""

    path: Path
    settings: Mapping[str, Any]
    """Empty for a file."""
    policy: Mapping[str, Any] | None
    """As in its settings; `None` for a file."""
    extent: Extent | None
    created: int | None

    @property
    def is_file(self) -> bool:
        return self.extent is None

    @property
    def rollouts(self) -> Path:
        """Its file of rollouts."""
        return self.path if self.is_file else self.path / ROLLOUTS

    @property
    def shard(self) -> tuple[int, int]:
        """Index and count; (1, 1) for a whole run."""
        return (1, 1) if self.extent is None else self.extent.shard

    @property
    def whole(self) -> Path:
        """The path of the whole run that a shard is a part of."""
        return self.path.parent if self.shard[1] > 1 else self.path


class Reading:
    """The rollouts of a run as they are read, and which of its plan were there."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.planned = None if run.extent is None else read_planned(run.path, run.extent)
        self.there, self.strange, self.twice = IdentitySet(), IdentitySet(), IdentitySet()
        """Rollouts of the plan, others, and those that an earlier line or run has too."""
        self.also_in: Path | None = None
        """The run that has the first of `twice`."""
        self._failed: list[Attempt] = []
        """Those among the rollouts: NeMo Gym's file has failed ones, too."""

    def rollouts(self) -> Iterator[Attempt]:
        """Yield its finished rollouts."""
        for attempt in stored_attempts(self.run.rollouts):
            if attempt.has_failed:
                self._failed.append(attempt)
                continue
            planned = self.planned is None or attempt.identity in self.planned
            (self.there if planned else self.strange).add(attempt.identity)
            yield attempt

    def failed_attempts(self) -> Iterator[Attempt]:
        """Yield the failed attempts, of a file the last one of each rollout that NeMo Gym noted."""
        yield from self._failed
        if self.run.is_file:
            yield from read_gym_failures(self.run.path)
        else:
            yield from stored_attempts(self.run.path / FAILURES)


class Runs:
    """Runs read as one, each rollout once: what every table, report and export is made of."""

    def __init__(self, paths: Iterable[Path], *, first_of_overlap: bool = False) -> None:
        """Find the runs at `paths`, directories (shards included) and files of rollouts that NeMo Gym collected.

        A rollout that is in two runs is refused, or taken from the first one (`first_of_overlap`). Raises `DataError` if no
        path holds a run, and `ConfigError` for runs of different policies.
        """
        self.paths = list(paths)
        self.runs: list[Run] = []
        self._without: list[str] = []
        for path in self.paths:
            runs = runs_at(path)
            if not runs:
                self._without.append(f"{path} holds no run: neither it nor a shard in it has a {RUN}")
            for run in runs:
                self._add(run)
        if not self.runs:
            raise DataError(self._without[0], path=str(self.paths[0]))
        self._first_of_overlap = first_of_overlap
        self.missing: list[str] = []
        """Notes on runs, shards and rollouts that are missing; complete after `rollouts`."""
        self.missing_shards: list[str] = []
        """Those of `missing` that hold for a run under way, too."""
        self.lost: list[str] = []
        """Notes on rollouts that failed permanently; complete after `rollouts`."""
        self.notes: list[str] = []
        """Notes on rollouts that are in two runs, or in a run but not in its plan; complete after `rollouts`."""
        self._start_over()

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

    @property
    def is_example(self) -> bool:
        """Whether all rows are their environments' examples."""
        return all(is_example(run.settings.get("sources") or ()) for run in self.runs)

    @property
    def planned(self) -> int | None:
        """How many rollouts the runs and the shards that were started have; `None` if one does not say."""
        totals = [None if run.extent is None else run.extent.rollouts for run in self.runs]
        return None if None in totals else sum(total or 0 for total in totals)

    def rollouts(self) -> Iterator[Attempt]:
        """Yield every finished rollout, from the first one. Raises `ConfigError` at the end if some are in two runs."""
        self._start_over()
        for reading in self._readings:
            for attempt in reading.rollouts():
                self._environments[_row_name(reading.run, attempt)] = attempt.environment
                if self._finished[attempt.environment].add(attempt.identity):
                    yield attempt
                else:
                    reading.also_in = reading.also_in or self._first_with(attempt)
                    reading.twice.add(attempt.identity)
        self._take_notes()

    def failures(self) -> Iterator[Attempt]:
        """Yield the failure of every rollout that failed permanently and finished in no run; call it after `rollouts`."""
        failed: dict[str, IdentitySet] = defaultdict(IdentitySet)
        for reading in self._readings:
            for attempt in self._placed(reading):
                finished = attempt.identity in self._finished[attempt.environment]
                if attempt.final and not finished and failed[attempt.environment].add(attempt.identity):
                    yield attempt

    def failed_attempts(self) -> Iterator[Attempt]:
        """Yield every failed attempt; call it after `rollouts`."""
        for reading in {reading.run.path.resolve(): reading for reading in self._readings}.values():
            yield from self._placed(reading)

    def _take_notes(self) -> None:
        """Note gaps, lost and strange rollouts, and duplicates. Raises `ConfigError` for the last, unless the first is taken."""
        self.missing_shards = [*self._missing_shards(), *self._uneven_shards()]
        self.missing, self.lost, self.notes, overlaps = [*self._without], [], [], []
        for reading in self._readings:
            run = reading.run
            if reading.twice.first:
                overlaps.append(
                    f"{len(reading.twice)} rollouts of {run.path} are in {reading.also_in} too ({reading.twice.first})"
                )
            if reading.strange.first:
                self.notes.append(
                    f"{run.path}: its last command asked for fewer rows, repeats or seeds; {len(reading.strange)} older "
                    f"rollouts are still included ({reading.strange.first})"
                )
            self._note_gaps(reading)
        self.missing += self.missing_shards
        if overlaps and not self._first_of_overlap:
            raise ConfigError(
                f"{'; '.join(overlaps)}; leave one out, or take each from the first: --overlap first"
            )
        self.notes += (f"{overlap}; the first is taken" for overlap in overlaps)

    def _note_gaps(self, reading: Reading) -> None:
        """Note the rollouts of a run that failed permanently, and those of its plan that are not there."""
        run, there = reading.run, reading.there
        total = None if run.extent is None else run.extent.rollouts
        if not (run.is_file if total is None else len(there) < total):
            return
        lost = IdentitySet()
        for attempt in reading.failed_attempts():
            planned = reading.planned is None or attempt.identity in reading.planned
            if attempt.final and planned and attempt.identity not in there:
                lost.add(attempt.identity)
        count = len(there) + len(lost) if total is None else total
        if len(lost):
            self.lost.append(f"{run.path}: {len(lost)} of {count} rollouts failed")
        if (gone := count - len(there) - len(lost)) > 0:
            self.missing.append(f"{run.path}: {gone} of {count} rollouts are missing")

    def _start_over(self) -> None:
        self._readings = [Reading(run) for run in self.runs]
        self._finished: dict[str, IdentitySet] = defaultdict(IdentitySet)
        self._environments: dict[RowName, str] = {}
        """Environments of rows, as their finished rollouts name them: a failure may not know it."""

    def _placed(self, reading: Reading) -> Iterator[Attempt]:
        """Yield a run's failed attempts; one that reached no environment gets that of its row's finished rollouts."""
        for attempt in reading.failed_attempts():
            known = self._environments.get(_row_name(reading.run, attempt), "")
            yield attempt if attempt.environment or not known else attempt.in_environment(known)

    def _add(self, run: Run) -> None:
        """Add a run. Raises `ConfigError` if its policy is another one, or if it scores context overflows otherwise."""
        first = self._described or run
        if run.policy is not None and (changed := differences(_deciding(first), _deciding(run))):
            raise ConfigError(
                f"{first.path} and {run.path} have different settings ({'; '.join(changed)}); read them separately, or "
                f"both with gymgate compare {shlex.quote(str(first.path))} {shlex.quote(str(run.path))}"
            )
        self.runs.append(run)

    def _first_with(self, attempt: Attempt) -> Path:
        key = attempt.environment, attempt.identity
        return next(
            run.path
            for run in self.runs
            if any(key == (other.environment, other.identity) for other in Reading(run).rollouts())
        )

    def _missing_shards(self) -> Iterator[str]:
        shards: dict[tuple[Path, int], set[int]] = {}
        for run in self.runs:
            index, count = run.shard
            shards.setdefault((run.whole, count), set()).add(index)
        for (path, count), there in shards.items():
            absent = list(islice((index for index in range(1, count + 1) if index not in there), _NAMED + 1))
            if absent:  # as many as somebody's file says
                more = ", ..." if len(absent) > _NAMED else ""
                yield f"{path}: shards {', '.join(map(str, absent[:_NAMED]))}{more} of {count} are missing"

    def _uneven_shards(self) -> Iterator[str]:
        """Name the shards of one run whose commands had different rows, repeats or seeds."""
        extents: dict[tuple[Path, int], dict[str, str]] = {}
        for run in self.runs:
            if run.extent is not None and run.shard[1] > 1:
                extent = run.extent.model_dump(include={"rows", "repeats", "seeds"}, exclude_none=True)
                text = ", ".join(f"{name} {value}" for name, value in extent.items())
                extents.setdefault((run.whole, run.shard[1]), {}).setdefault(text, run.path.name)
        for (path, _), names in extents.items():
            if len(names) > 1:
                described = "; ".join(f"{name} has {text}" for text, name in names.items())
                yield f"{path}: its shards were run differently, so rollouts are missing ({described})"


def read_runs(
    paths: Iterable[Path], *, answer_key: str | None = None, first_of_overlap: bool = False
) -> CollectedTasks:
    """Read the runs at `paths` by task. Raises as `Runs` does."""
    return read_tasks(Runs(paths, first_of_overlap=first_of_overlap), answer_key)


def read_tasks(
    runs: Runs,
    answer_key: str | None = None,
    see: Callable[[Attempt], None] = lambda _: None,
    see_attempt: Callable[[Attempt], None] = lambda _: None,
) -> CollectedTasks:
    """Read runs by task; the answer is in `answer_key`, else in the first known field.

    `see` gets each rollout that finished, and then each that failed permanently; `see_attempt` gets each failed attempt.
    """
    collected = CollectedTasks(policy=runs.policy, created=runs.created)
    for attempt in runs.rollouts():
        collected.add(attempt, answer_key)
        see(attempt)
    for attempt in runs.failures():
        collected.fail(attempt)
        see(attempt)
    for attempt in runs.failed_attempts():
        collected.usage.add(attempt.environment, attempt.tokens)
        see_attempt(attempt)
    collected.lost, collected.strange, collected.missing = runs.lost, runs.notes, runs.missing
    return collected


def refuse_empty(runs: Runs, collected: CollectedTasks) -> None:
    """Raise `DataError` for runs without a rollout, finished, failed or planned."""
    if not collected.tasks and not collected.missing:
        raise DataError(f"no rollouts in {', '.join(map(str, runs.paths))}", path=str(runs.paths[0]))


def _deciding(run: Run) -> dict[str, Any]:
    """Return the settings that runs which are read together must have in common."""
    return {"policy": run.policy, "context_overflow": context_overflow_of(run.settings)}


def runs_at(path: Path) -> list[Run]:
    """Return the run at a path and its shards, or the rollouts in a file; empty if there are none.

    A run's own file of rollouts is its run, which has failed attempts and a plan, too.
    """
    path = run_of_file(path)
    if path.is_file():
        return [Run(path, {}, None, None, None)]
    return [_read_description(directory) for directory in run_directories(path)]


def _read_description(path: Path) -> Run:
    described = read_run(path)
    settings = described["settings"]
    policy = settings.get("policy")
    policy = policy if isinstance(policy, Mapping) else {"type": policy}
    extent = Extent.model_validate(described.get("extent") or {})
    return Run(path, settings, policy, extent, described.get("created"))


def _row_name(run: Run, attempt: Attempt) -> RowName:
    """Return what a rollout's row is called within its run, whatever its environment is."""
    return run.whole, attempt.row_key, attempt.occurrence
