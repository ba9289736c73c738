"""A curriculum: rows are drawn by how near their pass rate is to a target.

A group of rollouts whose rewards are all equal teaches nothing, so rows that a model always or never solves cost time.
NVIDIA drew rows by a Gaussian around a target pass rate for Nemotron 3 Nano. Here the rates are followed while the model
learns: each row has a Beta posterior of its pass rate, updated from the training's own rollouts, and old evidence fades
because the model changes. A draw samples a rate from each posterior (Thompson sampling), so rows that are little known
are tried in proportion to how likely they are near the target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from gymgate.core.config import Config
from gymgate.core.errors import ConfigError
from gymgate.rollouts.rowfile import RowFile

STATE_VERSION = 1
UNIFORM = np.array([4.0, 4 / 2, 4 / 3])
"""Four rows' worth of a uniform distribution of rates: what is assumed before rows were drawn."""
LEAST_STRENGTH, MOST_STRENGTH = 0.1, 10.0
"""Bounds of the prior's strength, in rollouts."""


class CurriculumConfig(Config):
    """How rows are drawn by their pass rate."""

    target: float = Field(0.5, gt=0, lt=1)
    """Pass rate around which rows are drawn. Rewards are read as parts of a pass, cut at 0 and 1."""
    width: float = Field(0.2, gt=0)
    """Standard deviation of the Gaussian around the target."""
    half_life: float = Field(40.0, gt=0)
    """Updates of the curriculum (batches) after which an observation counts half."""
    explore: float = Field(0.1, gt=0, le=1)
    """Part of the draws that take any row, so that no row is lost."""
    rates: str | None = None
    """File of pass rates to start from, as `gymgate aggregate RUN -o tasks.jsonl` writes it."""


class Group(NamedTuple):
    """The rollouts of one row in a batch."""

    environment: str
    position: int
    """Of the row among its environment's rows."""
    rewards: Sequence[float | None]
    """`None` for a rollout that does not count; it teaches the curriculum nothing."""


def _key(row_key: str, occurrence: int) -> str:
    """Return the key of a row; each further row that equals it has its own."""
    return f"{row_key}#{occurrence + 1}" if occurrence else row_key


class _Rates:
    """The pass rates of one environment's rows.

    Each row's rate has a Beta posterior. The prior is what rows turned out to be when they were drawn for the first time:
    if those were mostly hopeless, one that is not known yet is likely to be, too. Evidence fades: `passed` and `failed` are
    as of update `seen`, and `first` (weight, mean rate, mean squared rate, as sums) as of update `first_seen`.
    """

    def __init__(self, keys: Sequence[str], half_life: float) -> None:
        earlier: Counter[str] = Counter()
        self.keys: list[str] = []
        """Different ones for equal rows."""
        for key in keys:
            self.keys.append(_key(key, earlier[key]))
            earlier[key] += 1
        self.half_life = half_life
        self.passed, self.failed, self.seen = (np.zeros(len(self.keys)) for _ in range(3))
        self.first, self.first_seen = np.zeros(3), 0

    def posterior(self, now: int, at: Any = slice(None)) -> tuple[Any, Any]:
        """Return both parameters, of all rows or of one."""
        passed, failed = self._prior()
        fade = self._fade(now - self.seen[at])
        return passed + self.passed[at] * fade, failed + self.failed[at] * fade

    def add(self, at: int, rewards: Sequence[float], now: int) -> None:
        parts = [min(1.0, max(0.0, reward)) for reward in rewards]
        if not self.passed[at] + self.failed[at] and len(parts) > 1:
            self._add_first(parts, now)
        fade = self._fade(now - self.seen[at])
        self.passed[at] = self.passed[at] * fade + sum(parts)
        self.failed[at] = self.failed[at] * fade + len(parts) - sum(parts)
        self.seen[at] = now

    def state(self) -> dict[str, Any]:
        known = np.flatnonzero(self.passed + self.failed)
        rows = {
            self.keys[at]: [float(self.passed[at]), float(self.failed[at]), int(self.seen[at])]
            for at in known
        }
        return {"rows": rows, "first": [*self.first.tolist(), self.first_seen]}

    def restore(self, state: Mapping[str, Any]) -> None:
        *first, self.first_seen = state["first"]
        self.first = np.array(first)
        for at, key in enumerate(self.keys):
            self.passed[at], self.failed[at], self.seen[at] = state["rows"].get(key, (0.0, 0.0, 0))

    def _add_first(self, parts: Sequence[float], now: int) -> None:
        total, count = sum(parts), len(parts)
        # products of different rollouts: their mean is the squared rate, without the rewards' own variance
        squared = (total**2 - sum(part**2 for part in parts)) / (count * (count - 1))
        self.first = self.first * self._fade(now - self.first_seen) + [1.0, total / count, squared]
        self.first_seen = now

    def _prior(self) -> tuple[float, float]:
        """Return the Beta distribution with the moments of first draws."""
        weight, *sums = self.first + UNIFORM
        mean, squared = (each / weight for each in sums)
        spread = mean * (1 - mean)
        strength = np.clip(spread / max(squared - mean**2, 1e-6) - 1, LEAST_STRENGTH, MOST_STRENGTH)
        return mean * strength, (1 - mean) * strength

    def _fade(self, updates: Any) -> Any:
        return 0.5 ** (updates / self.half_life)


class Curriculum:
    """Draws rows, and learns their pass rates from groups of rollouts.

    `rows` has the key (`row_key`) of each environment's rows, in order. Processes that make the same calls draw the same
    rows. Raises `ConfigError` for a file of rates that has none of the rows.
    """

    def __init__(self, config: CurriculumConfig, rows: Mapping[str, Sequence[str]], *, seed: int = 0) -> None:
        self.config = config
        self._seed = seed
        self._updates = 0
        self._draws = 0
        self._rates = {environment: _Rates(keys, config.half_life) for environment, keys in rows.items()}
        if config.rates is not None:
            self._start_from(Path(config.rates))

    def draw(self, environments: Sequence[str]) -> list[int]:
        """Return a row's position for each of the environments; no row twice while an environment has others."""
        dice = np.random.default_rng([self._seed, self._draws])
        self._draws += 1
        drawn: dict[str, list[int]] = {}
        for environment in dict.fromkeys(environments):
            order = self._order(self._rates[environment], dice)
            wanted = environments.count(environment)
            drawn[environment] = np.resize(order[:wanted], wanted).tolist()
        return [drawn[environment].pop(0) for environment in environments]

    def update(self, groups: Iterable[Group]) -> dict[str, float]:
        """Learn from a batch and return what trainers log of it.

        `flat_groups` is the share of groups with equal rewards, of those with two that count; `distance` the mean
        distance of the groups' mean reward to the target. A number that does not exist is left out.
        """
        self._updates += 1
        flat: list[float] = []
        distances: list[float] = []
        for environment, position, given in groups:
            rewards = [reward for reward in given if reward is not None]
            if not rewards:
                continue
            self._rates[environment].add(position, rewards, self._updates)
            distances.append(abs(sum(rewards) / len(rewards) - self.config.target))
            if len(rewards) > 1:
                flat.append(min(rewards) == max(rewards))
        metrics: dict[str, list[float]] = {"flat_groups": flat, "distance": distances}
        return {name: sum(values) / len(values) for name, values in metrics.items() if values}

    def learn(self, rewards: Iterable[tuple[Hashable, tuple[str, int], float | None]]) -> dict[str, float]:
        """Update by a batch: group, environment and position, and reward of each rollout. Return metrics for a trainer's log."""
        groups: dict[tuple[Hashable, tuple[str, int]], list[float | None]] = {}
        for group, place, reward in rewards:
            groups.setdefault((group, place), []).append(reward)
        metrics = self.update(Group(*place, each) for (_, place), each in groups.items())
        return {f"curriculum_{name}": value for name, value in metrics.items()}

    def rate(self, environment: str, position: int) -> float:
        """Return the expected pass rate of a row; 0.5 of one that nothing is known of."""
        passed, failed = self._rates[environment].posterior(self._updates, position)
        return float(passed / (passed + failed))

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON: the rows that something is known of, by their keys."""
        return {
            "version": STATE_VERSION,
            "updates": self._updates,
            "draws": self._draws,
            "environments": {environment: rates.state() for environment, rates in self._rates.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Rows that the data no longer has are left out. Raises `ConfigError` for another version's."""
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"the curriculum's state has version {state.get('version')!r}, not {STATE_VERSION}"
            )
        self._updates, self._draws = int(state["updates"]), int(state["draws"])
        for environment, rates in self._rates.items():
            if (known := state["environments"].get(environment)) is not None:
                rates.restore(known)

    def _order(self, rates: _Rates, dice: np.random.Generator) -> np.ndarray:
        """Return all rows in the order in which weights without replacement draw them (Efraimidis and Spirakis, 2006)."""
        config, count = self.config, len(rates.keys)
        sampled = dice.beta(*rates.posterior(self._updates))
        near = np.exp(-0.5 * ((sampled - config.target) / config.width) ** 2) + 1e-12
        weights = (1 - config.explore) * near / near.sum() + config.explore / count
        return np.argsort(dice.exponential(size=count) / weights)

    def _start_from(self, path: Path) -> None:
        positions = {
            (environment, key): at
            for environment, rates in self._rates.items()
            for at, key in enumerate(rates.keys)
        }
        found = 0
        for number, task in RowFile(path).numbered():
            try:
                key = _key(task["row_key"], int(task.get("occurrence", 0)))
                place, rewards = (task["environment"], key), [float(reward) for reward in task["rewards"]]
            except (KeyError, TypeError, ValueError):
                raise ConfigError(
                    f"{path}:{number}: no task with its rewards, as `gymgate aggregate RUN -o {path.name}` writes it"
                ) from None
            if (at := positions.get(place)) is not None and rewards:
                self._rates[place[0]].add(at, rewards, 0)
                found += 1
        if not found:
            raise ConfigError(f"{path} has no rate of any row of {', '.join(self._rates)}")
