"""Reads any number of runs and shards as one, and notes duplicates, gaps, and runs that do not mix."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gymgate.core.errors import ConfigError, DataError
from gymgate.runs.counted.account import notes_on
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.described.plan import Identity, IdentitySet
from gymgate.runs.described.settings import context_overflow_of, differences, is_example
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.gym_rollouts import read_gym_failures, read_scored_failures, stored_attempts
from gymgate.runs.stored.layout import (
    FAILURES,
    ROLLOUTS,
    Extent,
    read_planned,
    read_run,
    run_directories,
    run_of_file,
    without_run,
)
from gymgate.runs.stored.score import Score, score_of

_NAMED = 100
"""Missing shards that a note names."""
See = Callable[[Attempt, Score], None]
Role = Literal["rollout", "duplicate", "failed rollout", "failed attempt", "failed duplicate"]
"""What a line is among all that are read: a rollout that finished, or the last attempt at one that did not; another attempt at
it; or what an earlier line or run has too."""


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


@dataclass(frozen=True)
class RunTable:
    """Runs read as one: what every table, report and export is made of."""

    paths: Sequence[Path]
    """Where they were looked for."""
    runs: Sequence[Run]
    tasks: CollectedTasks
    """Their rollouts, each counted once."""
    reward_parts: Sequence[str]
    """The names of all parts of rewards of rollouts that finished."""
    strange: Sequence[str]
    """Notes on rollouts that are in two runs, or in none's plan, and on runs that score one environment differently."""
    gaps: Sequence[str]
    """Notes on paths without a run, and on rollouts that are not there, which a run under way has yet to do."""
    missing_shards: Sequence[str]
    """Notes on shards that are not there, or that were run differently."""

    @property
    def missing(self) -> list[str]:
        return [*self.gaps, *self.missing_shards]

    @property
    def notes(self) -> list[str]:
        """Everything that a reader of the numbers has to know."""
        return [*self.strange, *self.missing, *notes_on(self.tasks)]

    @property
    def policy(self) -> Mapping[str, Any] | None:
        """The policy of all runs; `None` for rollouts that NeMo Gym collected."""
        return next((run.policy for run in self.runs if run.policy is not None), None)

    @property
    def replayed(self) -> bool:
        """Whether recorded rollouts answered for the policy."""
        return self.policy is not None and self.policy.get("type") == "replay"

    @property
    def created(self) -> int | None:
        """Start of the first run, in seconds since 1970."""
        return next((run.created for run in self.runs if run.policy is not None), None)

    @property
    def is_example(self) -> bool:
        """Whether all rows are their environments' examples."""
        return all(is_example(run.settings.get("sources") or ()) for run in self.runs)

    @property
    def planned(self) -> int | None:
        """How many rollouts the runs and the shards that were started have; `None` if one does not say."""
        totals = [None if run.extent is None else run.extent.rollouts for run in self.runs]
        return None if None in totals else sum(total or 0 for total in totals)

    def rollouts(self, *, failed: bool = False) -> Iterator[Attempt]:
        """Read every rollout that finished once more and, with `failed`, then those that failed permanently."""
        return rollouts_of(self.runs, failed=failed)

    def refuse_empty(self) -> None:
        """Raise `DataError` if there is no rollout, finished, failed or planned."""
        if not self.tasks.tasks and not self.missing:
            raise DataError(f"no rollouts in {', '.join(map(str, self.paths))}", path=str(self.paths[0]))


def read_runs(
    paths: Iterable[Path],
    *,
    answer_key: str | None = None,
    first_of_overlap: bool = False,
    failed_as: float | None = None,
    see: See | None = None,
    see_attempt: Callable[[Attempt], None] | None = None,
) -> RunTable:
    """Read the runs at `paths`, directories (shards included) and files of rollouts that NeMo Gym collected.

    The answer of a rollout is in `answer_key` of its result, else in the first known field. `see` gets each rollout, first
    those that finished, then those that failed permanently; `see_attempt` gets each failed attempt, after the rollouts that
    finished. Rollouts that failed permanently count with the reward `failed_as`; `None`: they are left out. A rollout that is
    in two runs is refused, or taken from the first one (`first_of_overlap`). Raises `DataError` if no path holds a run or a
    line is malformed, and `ConfigError` for runs of different policies.
    """
    paths = list(paths)
    runs, without = _find_runs(paths)
    tasks, parts = CollectedTasks(failed_as=failed_as), dict[str, None]()
    tallies = [_Tally(run) for run in runs]
    for number, attempt, role in _read(runs):
        tally = tallies[number]
        tally.add(attempt, role)
        if role == "duplicate":
            tally.also_in = tally.also_in or _first_with(attempt, runs)
        if role in ("duplicate", "failed duplicate"):
            continue
        score = score_of(attempt, answer_key)
        if role == "failed attempt":
            tasks.add_attempt(score)
        else:
            tasks.add(score)
            if see is not None:
                see(attempt, score)
        if role == "rollout":
            parts.update(dict.fromkeys(attempt.reward_parts or ()))
        elif see_attempt is not None:
            see_attempt(attempt)
    overlaps = [note for tally in tallies for note in tally.overlaps()]
    if overlaps and not first_of_overlap:
        raise ConfigError(
            f"{'; '.join(overlaps)}; leave one out, or take each from the first: --overlap first"
        )
    return RunTable(
        paths,
        runs,
        tasks,
        reward_parts=sorted(parts),
        strange=[
            *(note for tally in tallies for note in tally.strange_ones()),
            *(f"{overlap}; the first is taken" for overlap in overlaps),
            *scored_differently(runs),
        ],
        gaps=[*without, *(note for tally in tallies for note in tally.gaps())],
        missing_shards=[*_missing_shards(runs), *_uneven_shards(runs)],
    )


def rollouts_of(runs: Sequence[Run], *, failed: bool = False) -> Iterator[Attempt]:
    """Yield every rollout of runs that finished, once, and then with `failed` those that failed permanently."""
    roles = ("rollout", "failed rollout") if failed else ("rollout",)
    return (attempt for _, attempt, role in _read(runs, failed=failed) if role in roles)


def runs_at(path: Path) -> list[Run]:
    """Return the run at a path and its shards, or the rollouts in a file; empty if there are none.

    A run's own file of rollouts is its run, which has failed attempts and a plan, too.
    """
    path = run_of_file(path)
    if path.is_file():
        return [Run(path, {}, None, None, None)]
    return [_read_description(directory) for directory in run_directories(path)]


def _find_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs at paths, and a note on each path without one.

    Raises `DataError` if there is none, and `ConfigError` for runs of different policies or that score context overflows
    differently, and for shards of one run with any other settings.
    """
    runs: list[Run] = []
    without = []
    first: Run | None = None
    first_shards: dict[Path, Run] = {}
    for path in paths:
        there = runs_at(path)
        if not there:
            without.append(without_run(path))
        for run in there:
            if run.policy is not None:
                first = first or run
                _refuse_other_policy(first, run)
            if run.shard[1] > 1:
                _refuse_other_settings(first_shards.setdefault(run.whole, run), run)
        runs += there
    if not runs:
        raise DataError(without[0], path=str(paths[0]))
    return runs, without


def _refuse_other_policy(first: Run, run: Run) -> None:
    if changed := differences(_deciding(first), _deciding(run)):
        raise ConfigError(
            f"{first.path} and {run.path} have different settings ({'; '.join(changed)}); read them separately, or "
            f"both with gymgate compare {shlex.quote(str(first.path))} {shlex.quote(str(run.path))}"
        )


def _refuse_other_settings(first: Run, run: Run) -> None:
    """Raise `ConfigError` for two shards of which one could not be a resume of the other."""
    if changed := differences(first.settings, run.settings):
        raise ConfigError(
            f"{first.path} and {run.path} are shards of one run and have different settings ({'; '.join(changed)}); read "
            "each by itself, or run one again to another -o"
        )


def _deciding(run: Run) -> dict[str, Any]:
    """Return the settings that runs which are read together must have in common."""
    return {"policy": run.policy, "context_overflow": context_overflow_of(run.settings)}


def scored_differently(runs: Sequence[Run]) -> Iterator[str]:
    """Name the runs that score an environment by other settings than an earlier run, and those settings, not their values."""
    first: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run in runs:
        shared = {name: run.settings[name] for name in ("nemo_gym", "judges") if name in run.settings}
        environments = run.settings.get("environments")
        for environment in environments if isinstance(environments, list) else ():
            name = str(environment.get("name")) if isinstance(environment, Mapping) else ""
            scoring = {**shared, "environment": environment}
            earlier, before = first.setdefault(name, (run, scoring))
            if changed := differences(before, scoring):
                names = ", ".join(dict.fromkeys(change.partition(": ")[0] for change in changed))
                yield f"{earlier.path} and {run.path} may score {name} differently: {names} differ"


def _read_description(path: Path) -> Run:
    described = read_run(path)
    settings = described["settings"]
    policy = settings.get("policy")
    policy = policy if isinstance(policy, Mapping) else {"type": policy}
    extent = Extent.model_validate(described.get("extent") or {})
    return Run(path, settings, policy, extent, described.get("created"))


def _read(runs: Sequence[Run], *, failed: bool = True) -> Iterator[tuple[int, Attempt, Role]]:
    """Yield every line of runs with its run's number: all rollouts that finished and then, with `failed`, the failed attempts.

    The former come first because they decide what the latter are: a rollout may have failed in one run, or before
    `--rerun-failed`, and finished in the next, and an attempt that reached no environment gets that of its row's rollouts.
    """
    finished: dict[str, IdentitySet] = defaultdict(IdentitySet)
    environments: dict[tuple[Path, str, int], str] = {}
    failed_lines: dict[int, list[Attempt]] = defaultdict(list)  # NeMo Gym's files of rollouts have some
    for number, run in enumerate(runs):
        for attempt in stored_attempts(run.rollouts):
            if attempt.has_failed:
                failed_lines[number].append(attempt)
                continue
            environments[run.whole, attempt.row_key, attempt.occurrence] = attempt.environment
            is_first = finished[attempt.environment].add(attempt.identity)
            yield number, attempt, "rollout" if is_first else "duplicate"
    for number, run in enumerate(
        runs
    ):  # after all rollouts: one that finished takes the place of its failures
        for attempt in read_scored_failures(run.path) if run.is_file else ():
            if finished[attempt.environment].add(attempt.identity):
                yield number, attempt, "rollout"
    if not failed:
        return
    lost: dict[str, IdentitySet] = defaultdict(IdentitySet)
    read: set[Path] = set()
    for number, run in enumerate(runs):
        is_first = (path := run.path.resolve()) not in read
        read.add(path)
        ended: dict[str, IdentitySet] = defaultdict(IdentitySet)
        last: dict[tuple[str, Identity], int] = {}  # of those that ended more than once: `--rerun-failed`
        for place, attempt in enumerate(_failed_attempts(run, failed_lines[number], environments)):
            if attempt.final and not ended[attempt.environment].add(attempt.identity):
                last[attempt.environment, attempt.identity] = place
        for place, attempt in enumerate(_failed_attempts(run, failed_lines[number], environments)):
            if not is_first:
                yield number, attempt, "failed duplicate"
            elif (
                attempt.final
                and attempt.identity not in finished[attempt.environment]
                and place >= last.get((attempt.environment, attempt.identity), 0)
                and lost[attempt.environment].add(attempt.identity)
            ):
                yield number, attempt, "failed rollout"
            else:
                yield number, attempt, "failed attempt"


def _failed_attempts(
    run: Run, lines: Sequence[Attempt], environments: Mapping[tuple[Path, str, int], str]
) -> Iterator[Attempt]:
    """Yield the failed attempts among a run's lines and in its file of failures."""
    noted = read_gym_failures(run.path) if run.is_file else stored_attempts(run.path / FAILURES)
    for attempt in chain(lines, noted):
        environment = environments.get((run.whole, attempt.row_key, attempt.occurrence), "")
        yield attempt if attempt.environment or not environment else attempt.in_environment(environment)


def _first_with(attempt: Attempt, runs: Sequence[Run]) -> Path:
    """Return the first run that has a rollout."""
    key = attempt.environment, attempt.identity
    return next(
        run.path
        for run in runs
        if any(key == (other.environment, other.identity) for other in rollouts_of([run]))
    )


class _Tally:
    """Which rollouts of a run's plan are there."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.planned = None if run.extent is None else read_planned(run.path, run.extent)
        self.there, self.strange, self.twice = IdentitySet(), IdentitySet(), IdentitySet()
        """Rollouts of the plan that finished, others, and those that an earlier line or run has too."""
        self.lost = IdentitySet()
        """Those of the plan that failed permanently."""
        self.also_in: Path | None = None
        """The run that has the first of `twice`."""

    def add(self, attempt: Attempt, role: Role) -> None:
        is_planned = self.planned is None or attempt.identity in self.planned
        if role in ("rollout", "duplicate"):
            (self.there if is_planned else self.strange).add(attempt.identity)
        elif attempt.final and is_planned and attempt.identity not in self.there:
            self.lost.add(attempt.identity)
        if role == "duplicate":
            self.twice.add(attempt.identity)

    @property
    def total(self) -> int | None:
        """Rollouts of the plan; of a file, those that finished or failed; `None` if nothing says."""
        if self.run.extent is None:
            return len(self.there) + len(self.lost)
        return self.run.extent.rollouts

    def overlaps(self) -> Iterator[str]:
        if self.twice.first:
            yield f"{len(self.twice)} rollouts of {self.run.path} are in {self.also_in} too ({self.twice.first})"

    def strange_ones(self) -> Iterator[str]:
        if self.strange.first:
            yield (
                f"{self.run.path}: its last command asked for fewer rows, repeats or seeds; {len(self.strange)} older "
                f"rollouts are still included ({self.strange.first})"
            )

    def gaps(self) -> Iterator[str]:
        if self.total is not None and (gone := self.total - len(self.there) - len(self.lost)) > 0:
            yield f"{self.run.path}: {gone} of {self.total} rollouts are missing"


def _missing_shards(runs: Sequence[Run]) -> Iterator[str]:
    shards: dict[tuple[Path, int], set[int]] = {}
    for run in runs:
        index, count = run.shard
        shards.setdefault((run.whole, count), set()).add(index)
    for (path, count), there in shards.items():
        absent = list(islice((index for index in range(1, count + 1) if index not in there), _NAMED + 1))
        if absent:  # as many as somebody's file says
            more = ", ..." if len(absent) > _NAMED else ""
            yield f"{path}: shards {', '.join(map(str, absent[:_NAMED]))}{more} of {count} are missing"


def _uneven_shards(runs: Sequence[Run]) -> Iterator[str]:
    """Name the shards of one run whose commands had different rows, repeats or seeds."""
    extents: dict[tuple[Path, int], dict[str, str]] = {}
    for run in runs:
        if run.extent is not None and run.shard[1] > 1:
            extent = run.extent.model_dump(include={"rows", "repeats", "seeds"}, exclude_none=True)
            text = ", ".join(f"{name} {value}" for name, value in extent.items())
            extents.setdefault((run.whole, run.shard[1]), {}).setdefault(text, run.path.name)
    for (path, _), names in extents.items():
        if len(names) > 1:
            described = "; ".join(f"{name} has {text}" for text, name in names.items())
            yield f"{path}: its shards were run differently, so rollouts are missing ({described})"
