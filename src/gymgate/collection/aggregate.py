"""Reads any number of runs and shards as one, and says what is there twice, what is missing, what does not mix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymgate.collection.gym_rollouts import read_gym_failures, read_gym_rollouts
from gymgate.collection.plan import Identity
from gymgate.collection.record import identity_of, line_error, read_values
from gymgate.collection.settings import differences
from gymgate.collection.store import FAILURES, ROLLOUTS, RUN, read_run, run_directories
from gymgate.collection.tasks import CollectedTasks
from gymgate.errors import ConfigError, DataError

Key = tuple[str, Identity]
"""Environment and identity of a rollout."""


def read_runs(
    paths: Iterable[Path], *, answer_key: str | None = None, first_of_overlap: bool = False
) -> CollectedTasks:
    """Read the runs at `paths` by task, as `expand` finds them.

    Raises `DataError` for a directory without a run and `ConfigError` for runs of different policies, and for a
    rollout that is in two runs (unless `first_of_overlap`, which takes the first).
    """
    runs = expand(paths)
    collected = CollectedTasks()
    described = [read_run(run) if run.is_dir() else None for run in runs]
    _read_policy(collected, runs, described)
    run_of: dict[Key, int] = {}
    overlaps: Counter[int] = Counter()
    example: dict[int, Key] = {}
    for index, run in enumerate(runs):
        for key, value in _keyed_rollouts(run):
            if key in run_of:
                overlaps[index] += 1
                example.setdefault(index, key)
            else:
                run_of[key] = index
                collected.add(value, answer_key)
    given_up: set[Key] = set()
    for run in runs:
        for value in read_failures(run):
            key = _key(value)
            if value.get("final") and key not in run_of and key not in given_up:
                given_up.add(key)
                collected.task_of(value).failed += 1
    named = [
        f"{count} rollouts of {runs[index]} are in {runs[run_of[example[index]]]} too ({example[index][1]})"
        for index, count in sorted(overlaps.items())
    ]
    if named and not first_of_overlap:
        raise ConfigError(f"{'; '.join(named)}; leave one out, or take each from the first: --overlap first")
    collected.missing = _missing(runs, described, Counter(run_of.values()))
    collected.notes = [*(f"{each}; the first is taken" for each in named), *collected.missing]
    if collected.not_numbers:
        collected.notes.append(
            f"{collected.not_numbers} rewards are not finite numbers and are counted as unscored"
        )
    return collected


def expand(paths: Iterable[Path]) -> list[Path]:
    """The directories of runs at `paths`, shards included, and the files of rollouts that NeMo Gym collected.

    Raises `DataError` for a directory without a run.
    """
    found: list[Path] = []
    for path in paths:
        runs = [path] if path.is_file() else run_directories(path)
        if not runs:
            raise DataError(f"{path} holds no run: neither it nor a shard in it has a {RUN}", path=str(path))
        found += runs
    return found


def read_rollouts(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Every finished rollout of the runs at `paths`, one by one."""
    for run in expand(paths):
        if run.is_file():
            yield from read_gym_rollouts(run)
        else:
            yield from (value for _, value in read_values(run / ROLLOUTS))


def read_failures(run: Path) -> Iterator[dict[str, Any]]:
    """Failed attempts in a run's directory, or those noted beside a file of rollouts that NeMo Gym collected."""
    if run.is_file():
        yield from read_gym_failures(run)
    else:
        yield from (value for _, value in read_values(run / FAILURES))


def _keyed_rollouts(run: Path) -> Iterator[tuple[Key, dict[str, Any]]]:
    if run.is_file():
        yield from ((_key(value), value) for value in read_gym_rollouts(run))
        return
    for line, value in read_values(run / ROLLOUTS):
        try:
            yield _key(value), value
        except ValueError as error:
            raise line_error(run / ROLLOUTS, line, error) from error


def _key(value: Mapping[str, Any]) -> Key:
    return str(value.get("environment", "")), identity_of(value)


def _read_policy(
    collected: CollectedTasks, runs: Sequence[Path], described: Sequence[Mapping[str, Any] | None]
) -> None:
    """Raises `ConfigError` for two policies: their rollouts have no common mean."""
    first: tuple[Path, Mapping[str, Any]] | None = None
    for run, value in zip(runs, described, strict=True):
        if value is None:
            continue
        policy = value["settings"].get("policy")
        compared = {"policy": policy if isinstance(policy, Mapping) else {"type": policy}}
        if first is None:
            first = run, compared
            collected.policy, collected.created = compared["policy"], value.get("created")
        elif changed := differences(first[1], compared):
            raise ConfigError(
                f"{first[0]} and {run} have different policies ({'; '.join(changed)}); aggregate them apart"
            )


def _missing(
    runs: Sequence[Path], described: Sequence[Mapping[str, Any] | None], counts: Counter[int]
) -> list[str]:
    """Name the shards and rollouts that the runs planned and have not finished."""
    found: list[str] = []
    shards: dict[tuple[Path, int], set[int]] = {}
    for index, (run, value) in enumerate(zip(runs, described, strict=True)):
        extent = (value or {}).get("extent") or {}
        planned = extent.get("rollouts")
        if isinstance(planned, int) and counts[index] < planned:
            found.append(f"{run}: {planned - counts[index]} of {planned} rollouts are missing")
        shard, count = extent.get("shard") or (1, 1)
        if count > 1:
            shards.setdefault((run.parent, count), set()).add(shard)
    for (parent, count), there in shards.items():
        if absent := sorted({*range(1, count + 1)} - there):
            found.append(f"{parent}: shards {', '.join(map(str, absent))} of {count} are missing")
    return found
