"""Any number of runs and shards read as one: what is in two of them, what is missing, what does not mix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymgate.collection.gym_rollouts import read_gym_failures, read_gym_rollouts
from gymgate.collection.plan import Identity
from gymgate.collection.record import line_error, read_values
from gymgate.collection.store import FAILURES, ROLLOUTS, RUN, differences, read_run, run_directories
from gymgate.collection.tasks import Collected
from gymgate.errors import ConfigError, DataError

Place = tuple[str, Identity]
"""Environment and identity."""


def read_runs(
    paths: Iterable[Path], *, answer_key: str | None = None, first_of_overlap: bool = False
) -> Collected:
    """The rollouts under directories of runs, shards included, and in files that NeMo Gym's collector wrote.

    Raises `DataError` for a directory without a run and `ConfigError` for runs of different policies, and for a
    rollout that is in two of them (unless the first is to be taken).
    """
    directories = [found for path in paths for found in _directories(path)]
    collected = Collected()
    _refuse_mixture(directories)
    home: dict[Place, int] = {}
    overlaps: Counter[int] = Counter()
    example: dict[int, Place] = {}
    for index, directory in enumerate(directories):
        for place, value in _rollouts(directory):
            if place in home:
                overlaps[index] += 1
                example.setdefault(index, place)
            else:
                home[place] = index
                collected.add(value, answer_key)
    for directory in directories:
        _add_failures(collected, directory, home)
    _settle_overlaps(collected, directories, overlaps, example, home, first_of_overlap)
    _note_missing(collected, directories, home)
    if collected.not_numbers:
        collected.notes.append(
            f"{collected.not_numbers} rewards are not finite numbers and are counted as unscored"
        )
    return collected


def _directories(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = run_directories(path)
    if not found:
        raise DataError(f"{path} holds no run: neither it nor a shard in it has a {RUN}", path=str(path))
    return found


def _rollouts(directory: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    path = directory / ROLLOUTS
    if directory.is_file():
        for value in read_gym_rollouts(directory):
            yield _place(value), value
        return
    for line_number, value in read_values(path):
        try:
            yield _place(value), value
        except (KeyError, TypeError, ValueError) as error:
            raise line_error(path, line_number, f"not a rollout of a run: {error!r}") from error


def _place(value: Mapping[str, Any]) -> Place:
    seed = value.get("seed")
    identity = Identity(
        str(value["row_key"]),
        int(value.get("occurrence", 0)),
        int(value.get("repeat", 0)),
        None if seed is None else int(seed),
    )
    return str(value.get("environment", "")), identity


def read_failures(path: Path) -> Iterator[dict[str, Any]]:
    """Failed attempts of a run's directory, or those noted beside a file of NeMo Gym's rollouts."""
    if path.is_file():
        yield from read_gym_failures(path)
    else:
        yield from (value for _, value in read_values(path / FAILURES))


def _add_failures(collected: Collected, directory: Path, home: Container[Place]) -> None:
    """Rollouts that were given up and have not finished since."""
    given_up: set[Place] = set()
    for value in read_failures(directory):
        place = _place(value)
        if value.get("final") and place not in home and place not in given_up:
            given_up.add(place)
            collected.task_of(value).failed += 1


def _refuse_mixture(directories: Sequence[Path]) -> None:
    """Rollouts of two policies have no common mean."""
    first: tuple[Path, Mapping[str, Any]] | None = None
    for directory in filter(Path.is_dir, directories):
        policy = read_run(directory)["settings"].get("policy")
        compared = {"policy": policy if isinstance(policy, Mapping) else {"type": policy}}
        if first is None:
            first = directory, compared
        elif changed := differences(first[1], compared):
            raise ConfigError(f"{first[0]} and {directory} are of different policies ({'; '.join(changed)})")


def _settle_overlaps(
    collected: Collected,
    directories: Sequence[Path],
    overlaps: Counter[int],
    example: Mapping[int, Place],
    home: Mapping[Place, int],
    first_of_overlap: bool,
) -> None:
    named = [
        f"{count} rollouts of {directories[place]} are in {directories[home[example[place]]]} too ({example[place][1]})"
        for place, count in sorted(overlaps.items())
    ]
    if named and not first_of_overlap:
        raise ConfigError(f"{'; '.join(named)}; leave one out, or take each from the first: --overlap first")
    collected.notes += [f"{note}; the first is taken" for note in named]


def _extent(directory: Path) -> Mapping[str, Any]:
    return (read_run(directory).get("extent") or {}) if directory.is_dir() else {}


def _note_missing(collected: Collected, directories: Sequence[Path], home: Mapping[Place, int]) -> None:
    """What the runs set out to do and have not."""
    have = Counter(home.values())
    for place, directory in enumerate(directories):
        extent = _extent(directory)
        planned = extent.get("rollouts")
        if isinstance(planned, int) and have[place] < planned:
            collected.missing.append(
                f"{directory}: {planned - have[place]} of {planned} rollouts are missing"
            )
    by_parent: dict[tuple[Path, int], set[int]] = {}
    for directory in directories:
        part, count = _extent(directory).get("shard") or (1, 1)
        if count > 1:
            by_parent.setdefault((directory.parent, count), set()).add(part)
    for (parent, count), parts in by_parent.items():
        if missing := sorted({*range(1, count + 1)} - parts):
            collected.missing.append(
                f"{parent}: shards {', '.join(map(str, missing))} of {count} are missing"
            )
    collected.notes += collected.missing
