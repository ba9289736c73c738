"""Which rollouts a run consists of: rows x seeds x repeats, each with an identity that outlives reordering."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gymgate.dataset import Row, RowSource
from gymgate.errors import ConfigError, DataError

SEED_STRIDE = 1 << 20
"""Between the seeds of a row's repeats; a seed must be smaller."""
_SEED_ITEM = re.compile(r"(\d+)(?:-(\d+))?")


class Identity(NamedTuple):
    """Names one rollout of a run, wherever its row stands in the input."""

    row_key: str
    """16 hex digits of the row's content."""
    occurrence: int
    """How many equal rows come before it in the input."""
    repeat: int
    """0-based."""
    seed: int | None

    def __str__(self) -> str:
        twin = f" (copy {self.occurrence + 1})" if self.occurrence else ""
        seed = f" seed {self.seed}" if self.seed is not None else ""
        return f"row {self.row_key}{twin} repeat {self.repeat}{seed}"


class Job(NamedTuple):
    """One rollout to run."""

    identity: Identity
    row: Row
    environment: str | None
    """`None`: the row's `agent_ref` says which."""
    task: int
    """Position of the row in the input, over all sources."""

    @property
    def sent_seed(self) -> int | None:
        """The seed that the policy gets: repeats of one seed must not be copies of each other."""
        seed = self.identity.seed
        return None if seed is None else seed + self.identity.repeat * SEED_STRIDE

    def __str__(self) -> str:
        return f"{self.row.source}:{self.row.line} ({self.identity})"


@dataclass(frozen=True)
class Shard:
    """Part `index` (1-based) of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def directory(self) -> str:
        """Where it lies in a run's directory."""
        return f"shard-{self.index}-of-{self.count}"

    def holds(self, identity: Identity) -> bool:
        """Neighbouring repeats and seeds of a row go to different shards, whatever the order of the rows."""
        row_key, occurrence, repeat, seed = identity
        return (int(row_key, 16) + occurrence + repeat + (seed or 0)) % self.count == self.index - 1


WHOLE = Shard(1, 1)


def parse_shard(text: str) -> Shard:
    """`I/N`, 1-based. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise ConfigError(f"--shard {text!r}: write I/N, such as 1/4")
    return checked_shard(int(match[1]), int(match[2]))


def checked_shard(index: int, count: int) -> Shard:
    """Raises `ConfigError` for a part that there is not."""
    if not 1 <= index <= count:
        raise ConfigError(f"there is no shard {index}/{count}: write I/N with I from 1 to N")
    return Shard(index, count)


def parse_seeds(text: str) -> tuple[int, ...]:
    """`4` is 0, 1, 2, 3; a list (`3,5,7-9`) is what it says. Raises `ConfigError`, also for a seed given twice."""
    if text.isdecimal() and int(text) > 0:
        return checked_seeds(range(int(text)))
    seeds: list[int] = []
    for item in filter(None, text.split(",")):
        match = _SEED_ITEM.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"--seeds {text!r}: write a number of seeds, or a list such as 3,5,7-9")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return checked_seeds(seeds)


def checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Distinct, in range, at least one; `ConfigError` if not."""
    if twice := sorted(seed for seed, count in Counter(seeds).items() if count > 1):
        raise ConfigError(f"seeds {', '.join(map(str, twice))} are given more than once")
    if not seeds:
        raise ConfigError("there must be at least one seed")
    if wrong := [seed for seed in seeds if not 0 <= seed < SEED_STRIDE]:
        raise ConfigError(f"seed {wrong[0]} is not between 0 and {SEED_STRIDE - 1}")
    return tuple(seeds)


class Done(Container[Identity]):
    """A set of identities that takes bits, not objects: an integer for each row, whatever the repeats."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int | None], int] = {}
        self._bits: dict[int | tuple[int, int], int] = {}
        self._count = 0

    def add(self, identity: Identity) -> bool:
        """Whether it is new."""
        bit = 1 << self._slots.setdefault(identity[2:], len(self._slots))
        name = self._name(identity)
        before = self._bits.get(name, 0)
        if before & bit:
            return False
        self._bits[name] = before | bit
        self._count += 1
        return True

    def __contains__(self, identity: object) -> bool:
        assert isinstance(identity, Identity)
        slot = self._slots.get(identity[2:])
        return slot is not None and bool(self._bits.get(self._name(identity), 0) >> slot & 1)

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def _name(identity: Identity) -> int | tuple[int, int]:
        number = int(identity.row_key, 16)
        return (number, identity.occurrence) if identity.occurrence else number


class Plan:
    """Every rollout of a run, or of one shard of it.

    Making one reads every row once, for its key; eight bytes of each are kept. Rows that cannot be read are left
    out and listed in `invalid`. Raises `DataError` where a source has no row at all, `ConfigError` for bad numbers.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        *,
        repeats: int = 1,
        seeds: Sequence[int] | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        if repeats < 1:
            raise ConfigError(f"repeats must be at least 1, not {repeats}")
        self.sources = list(sources)
        self.repeats = repeats
        self.seeds = None if seeds is None else checked_seeds(tuple(seeds))
        self.shard = shard
        self.invalid: list[DataError] = []
        self._keys = [array("Q") for _ in self.sources]
        self._copies: list[dict[int, int]] = [{} for _ in self.sources]
        self._skipped: list[set[int]] = [set() for _ in self.sources]
        self._read_keys()

    @property
    def rows(self) -> int:
        """Rows that can be read."""
        return sum(map(len, self._keys)) - sum(map(len, self._skipped))

    def total(self) -> int:
        """Rollouts of the shard."""
        if self.shard.count == 1:
            return self.rows * self.repeats * (len(self.seeds) if self.seeds is not None else 1)
        return sum(1 for _ in self.identities())

    def identities(self) -> Iterator[Identity]:
        """Of every rollout of the shard, in order."""
        return (identity for _, _, identity in self._places())

    def jobs(self, done: Container[Identity] = ()) -> Iterator[Job]:
        """What is left to run; a row is read when it is reached. Raises `DataError` if its file has changed."""
        last: tuple[int, int] | None = None
        row: Row | None = None
        starts = self._starts()
        for number, position, identity in self._places():
            if identity in done:
                continue
            if row is None or (number, position) != last:
                row, last = self.sources[number].rows[position], (number, position)
            yield Job(identity, row, self.sources[number].environment, starts[number] + position)

    def _places(self) -> Iterator[tuple[int, int, Identity]]:
        seeds: Sequence[int | None] = (None,) if self.seeds is None else self.seeds
        holds = self.shard.holds
        for number, keys in enumerate(self._keys):
            copies, skipped = self._copies[number], self._skipped[number]
            for position, key in enumerate(keys):
                if position in skipped:
                    continue
                row_key, occurrence = f"{key:016x}", copies.get(position, 0)
                for seed in seeds:
                    for repeat in range(self.repeats):
                        identity = Identity(row_key, occurrence, repeat, seed)
                        if self.shard.count == 1 or holds(identity):
                            yield number, position, identity

    def _starts(self) -> list[int]:
        starts = [0]
        for keys in self._keys:
            starts.append(starts[-1] + len(keys))
        return starts

    def _read_keys(self) -> None:
        seen: dict[int, int] = {}
        for number, source in enumerate(self.sources):
            source.refuse_empty()
            for position, row in source.readable():
                if isinstance(row, DataError):
                    self.invalid.append(row)
                    self._skipped[number].add(position)
                    self._keys[number].append(0)
                    continue
                key = int(row.key, 16)
                before = seen[key] = seen.get(key, -1) + 1
                if before:
                    self._copies[number][position] = before
                self._keys[number].append(key)
        if not self.rows:
            raise self.invalid[0]
