"""The rollouts of a run: rows x seeds x repeats, each with an identity that outlives reordering."""

from __future__ import annotations

import heapq
import re
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gymgate.core.errors import ConfigError, DataError, OptionError
from gymgate.gym.records import answer_warning, missing_answer
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts import Row

SEED_STRIDE = 1 << 20
"""Distance between the seeds of a row's repeats; a seed must be smaller."""
_SEED_ITEM = re.compile(r"(\d+)(?:-(\d+))?")


Order = tuple[int, int]
"""Seed and repeat of a task's rollout; without a seed -1, which is no seed."""


class Identity(NamedTuple):
    """Names one rollout of a run, wherever its row stands in the input."""

    row_key: str
    """16 hex digits of the row's content."""
    occurrence: int
    """Number of equal rows before this one in the input."""
    repeat: int
    """0-based."""
    seed: int | None

    @property
    def order(self) -> Order:
        return -1 if self.seed is None else self.seed, self.repeat

    def __str__(self) -> str:
        copy = f" (copy {self.occurrence + 1})" if self.occurrence else ""
        seed = f" seed {self.seed}" if self.seed is not None else ""
        return f"row {self.row_key}{copy} repeat {self.repeat}{seed}"


class PlannedRollout(NamedTuple):
    """One rollout to run."""

    identity: Identity
    row: Row
    environment: str | None
    """`None`: the row's `agent_ref` names the agent."""
    task: int
    """Position of the row in the input, over all sources."""

    @property
    def sent_seed(self) -> int | None:
        """The seed that the policy gets. Each repeat gets its own, so that repeats are not copies of each other."""
        seed = self.identity.seed
        return None if seed is None else seed + self.identity.repeat * SEED_STRIDE

    def __str__(self) -> str:
        return f"{self.row.source}:{self.row.line} ({self.identity})"


@dataclass(frozen=True)
class Shard:
    """Shard `index` (1-based) of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def directory(self) -> str:
        """Its directory's name in a run's directory."""
        return f"shard-{self.index}-of-{self.count}"

    def holds(self, identity: Identity) -> bool:
        """Whether a rollout belongs to this shard, whatever the order of the rows.

        Neighbouring repeats and seeds of a row go to different shards.
        """
        row_key, occurrence, repeat, seed = identity
        return (int(row_key, 16) + occurrence + repeat + (seed or 0)) % self.count == self.index - 1


WHOLE = Shard(1, 1)


def parse_shard(text: str) -> Shard:
    """Parse `I/N`, 1-based. Raises `OptionError`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise OptionError(f"--shard {text!r}: write I/N with I from 1 to N, e.g. 1/4")
    return Shard(int(match[1]), int(match[2]))


def checked_shard(index: int, count: int) -> Shard:
    """Raises `ConfigError` for an index out of range."""
    if not 1 <= index <= count:
        raise ConfigError(f"there is no shard {index}/{count}: write I/N with I from 1 to N")
    return Shard(index, count)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse a number of seeds (`4` is 0, 1, 2, 3) or a list (`3,5,7-9`). Raises `OptionError`."""
    items = text.split(",") if not text.isdecimal() or int(text) == 0 else [f"0-{int(text) - 1}"]
    seeds: list[int] = []
    for item in filter(None, items):
        match = _SEED_ITEM.fullmatch(item.strip())
        if match is None:
            raise OptionError(f"--seeds {text!r}: write a number of seeds, or a list, e.g. 3,5,7-9")
        if (last := int(match[2] or match[1])) >= SEED_STRIDE:
            raise OptionError(f"--seeds {text!r}: seed {last} is not between 0 and {SEED_STRIDE - 1}")
        seeds += range(int(match[1]), last + 1)
    try:
        return checked_seeds(seeds)
    except ConfigError as error:
        raise OptionError(f"--seeds {text!r}: {error}") from None


def checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Raises `ConfigError` unless there is at least one seed, each in range and given once."""
    if twice := sorted(seed for seed, count in Counter(seeds).items() if count > 1):
        raise ConfigError(f"seeds {', '.join(map(str, twice))} are given more than once")
    if not seeds:
        raise ConfigError("there must be at least one seed")
    if wrong := [seed for seed in seeds if not 0 <= seed < SEED_STRIDE]:
        raise ConfigError(f"seed {wrong[0]} is not between 0 and {SEED_STRIDE - 1}")
    return tuple(seeds)


class IdentitySet(Container[Identity]):
    """A set of identities that stores bits, not objects: one integer per row, however many its repeats and seeds.

    A million rollouts take 8 MB with 16 repeats of each row and 90 MB with one. A set of `Identity` takes 194 MB.
    """

    def __init__(self) -> None:
        self._bit_numbers: dict[tuple[int, int | None], int] = {}
        self._bits: dict[int | tuple[int, int], int] = {}
        self._count = 0
        self.first: Identity | None = None
        """The one that was added first."""

    def add(self, identity: Identity) -> bool:
        """Add it; whether it is new."""
        bit = 1 << self._bit_numbers.setdefault(identity[2:], len(self._bit_numbers))
        name = self._name(identity)
        before = self._bits.get(name, 0)
        if before & bit:
            return False
        self._bits[name] = before | bit
        self._count += 1
        self.first = self.first or identity
        return True

    def __contains__(self, identity: object) -> bool:
        assert isinstance(identity, Identity)
        number = self._bit_numbers.get(identity[2:])
        return number is not None and bool(self._bits.get(self._name(identity), 0) >> number & 1)

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def _name(identity: Identity) -> int | tuple[int, int]:
        number = int(identity.row_key, 16)
        return (number, identity.occurrence) if identity.occurrence else number


class PlannedIdentities(Container[Identity]):
    """The identities of a run's rollouts, from the keys of its rows and the extent in its `run.json`."""

    def __init__(self, row_keys: Iterable[str], extent: Mapping[str, Any]) -> None:
        self._copies = Counter(int(key, 16) for key in row_keys)
        self._repeats = extent["repeats"]
        self._seeds = frozenset([None] if extent["seeds"] is None else extent["seeds"])
        self._shard = Shard(*extent["shard"])

    def __contains__(self, identity: object) -> bool:
        assert isinstance(identity, Identity)
        row_key, occurrence, repeat, seed = identity
        there = occurrence < self._copies[int(row_key, 16)] and repeat < self._repeats and seed in self._seeds
        return there and self._shard.holds(identity)


class RolloutPlan:
    """Every rollout of a run, or of one shard of it; with `only`, those of them that it contains.

    The constructor reads every row once for its key and keeps eight bytes of each. Rows that cannot be read are listed
    in `invalid` and left out. Raises `DataError` for a source without rows or without a single readable one,
    `ConfigError` for bad numbers.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        *,
        repeats: int = 1,
        seeds: Sequence[int] | None = None,
        shard: Shard = WHOLE,
        only: Container[Identity] | None = None,
    ) -> None:
        if repeats < 1:
            raise ConfigError(f"repeats must be at least 1, not {repeats}")
        self.sources = list(sources)
        self.repeats = repeats
        self.seeds = None if seeds is None else checked_seeds(tuple(seeds))
        self.shard = shard
        self.only = only
        self.invalid: list[DataError] = []
        self.warnings: list[str] = []
        """Rows without the answer that scoring needs, in a line for each source. NeMo Gym scores them all the same."""
        self._invalid_rows: set[tuple[int, int]] = set()
        """By source and position."""
        self._keys = [array("Q") for _ in self.sources]
        self._occurrences: dict[tuple[int, int], int] = {}
        """By source and position, of rows that have an equal one before them."""
        self._read_keys()

    def environments_of_copies(self) -> dict[tuple[str, int], str | None]:
        """Return the environment of each row that equals another one, by row key and occurrence."""
        copied = {self._keys[number][position] for number, position in self._occurrences}
        return {
            (f"{key:016x}", self._occurrences.get((number, position), 0)): self.sources[number].environment
            for number, keys in enumerate(self._keys)
            for position, key in enumerate(keys)
            if key in copied and (number, position) not in self._invalid_rows
        }

    @property
    def rows(self) -> int:
        """Number of planned rows."""
        return sum(map(len, self._keys)) - len(self.invalid)

    def row_keys(self) -> Iterator[str]:
        """The key of every planned row, in order."""
        for number, keys in enumerate(self._keys):
            for position, key in enumerate(keys):
                if (number, position) not in self._invalid_rows:
                    yield f"{key:016x}"

    def total(self) -> int:
        """Number of rollouts of the shard."""
        if self.shard.count == 1 and self.only is None:
            return self.rows * self.repeats * (len(self.seeds) if self.seeds is not None else 1)
        return sum(1 for _ in self.identities())

    def identities(self) -> Iterator[Identity]:
        """The identity of every rollout of the shard, in order."""
        return (identity for _, _, identity in self._positions())

    def rollouts(self, done: Container[Identity] = ()) -> Iterator[PlannedRollout]:
        """Yield the rollouts that are not done; a row is read when it is reached. Raises `DataError` if its file has changed."""
        starts = [0]
        for keys in self._keys:
            starts.append(starts[-1] + len(keys))
        for number, position, identity in self._positions():
            if identity in done:
                continue
            source = self.sources[number]
            yield PlannedRollout(
                identity, source.rows[position], source.environment, starts[number] + position
            )

    def _positions(self) -> Iterator[tuple[int, int, Identity]]:
        """Yield each source's rollouts spread evenly, every row once before any row again: what has finished is a sample."""
        for repeat in range(self.repeats):
            for seed in (None,) if self.seeds is None else self.seeds:
                for number, position in self._spread():
                    row_key = f"{self._keys[number][position]:016x}"
                    occurrence = self._occurrences.get((number, position), 0)
                    identity = Identity(row_key, occurrence, repeat, seed)
                    if self.only is not None and identity not in self.only:
                        continue
                    if self.shard.count == 1 or self.shard.holds(identity):
                        yield number, position, identity

    def _spread(self) -> Iterator[tuple[int, int]]:
        """Yield source and position of every planned row; of each source the same share at any time."""

        def shares(number: int, count: int) -> Iterator[tuple[float, int, int]]:
            return (((position + 0.5) / count, number, position) for position in range(count))

        sources = (shares(number, len(keys)) for number, keys in enumerate(self._keys))
        for _, number, position in heapq.merge(*sources):
            if (number, position) not in self._invalid_rows:
                yield number, position

    def _read_keys(self) -> None:
        last_occurrences: dict[int, int] = {}
        for number, source in enumerate(self.sources):
            source.refuse_empty()
            unanswered: list[tuple[str, Row]] = []
            for position, row in source.readable():
                if isinstance(row, DataError):
                    self.invalid.append(row)
                    self._invalid_rows.add((number, position))
                elif (field := missing_answer(source.environment, row)) is not None:
                    unanswered.append((field, row))
                key = 0 if isinstance(row, DataError) else int(row.key, 16)
                before = last_occurrences[key] = last_occurrences.get(key, -1) + 1
                if before:
                    self._occurrences[number, position] = before
                self._keys[number].append(key)
            if unanswered:
                which = f"{len(unanswered)} of {len(source)} rows"
                self.warnings.append(answer_warning(source.environment, *unanswered[0], which))
        if len(self.invalid) == sum(map(len, self._keys)):
            raise self.invalid[0]
