"""A simulated learner whose pass rates are known: what a curriculum draws, and what that is worth.

    ./dev python -m benchmarks curriculum [--rows 500] [--steps 300] [--seeds 5]

The learner passes a row of difficulty d with probability sigmoid(ability - d). A group of 8 rollouts with unequal rewards
raises its ability by an amount in proportion to the variance of its rewards, which is what a policy gradient gets; a group
with equal rewards raises nothing. Difficulties are spread evenly over -8 to 8 and the ability starts at -5, so most rows
are hopeless at first and solved later. Printed, as means over the seeds with standard errors: the share of groups with
equal rewards, the mean distance of the drawn rows' true pass rate to the target, and the ability at the end.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from typing import NamedTuple

from gymgate.integrations.training.curriculum import Curriculum, CurriculumConfig, Group

ROLLOUTS = 8
GROUPS = 8
STEP = 0.1
"""Ability that a batch gains whose rewards all have the greatest variance, 1/4."""
EASIEST, HARDEST, ABILITY = -8.0, 8.0, -5.0


class Outcome(NamedTuple):
    """What one training came to."""

    flat: float
    distance: float
    ability: float


class Learner:
    """Passes rows at known rates, and learns from groups whose rewards differ."""

    def __init__(self, rows: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.difficulties = [EASIEST + (HARDEST - EASIEST) * at / (rows - 1) for at in range(rows)]
        self.ability = ABILITY

    def rate(self, row: int) -> float:
        return 1 / (1 + math.exp(self.difficulties[row] - self.ability))

    def run(self, row: int) -> list[float]:
        """Return the rewards of a group."""
        return [float(self.dice.random() < self.rate(row)) for _ in range(ROLLOUTS)]

    def train(self, rows: list[int]) -> list[list[float]]:
        """Run a group of each row, and learn from them together."""
        rewards = [self.run(row) for row in rows]
        self.ability += STEP * statistics.fmean(4 * statistics.pvariance(group) for group in rewards)
        return rewards


def simulate(
    config: CurriculumConfig | None, *, rows: int, steps: int, seed: int, measured: bool = False
) -> Outcome:
    """Train for a number of steps; without a config rows are drawn at random."""
    learner, target = Learner(rows, seed), 0.5 if config is None else config.target
    curriculum = Curriculum(
        config or CurriculumConfig(explore=1.0), {"": [str(at) for at in range(rows)]}, seed=seed
    )
    if measured:
        curriculum.update(Group("", row, learner.run(row)) for row in range(rows))
    flat, distances = [], []
    for _ in range(steps):
        drawn = curriculum.draw([""] * GROUPS)
        distances += [abs(learner.rate(row) - target) for row in drawn]
        rewards = learner.train(drawn)
        curriculum.update(Group("", row, group) for row, group in zip(drawn, rewards, strict=True))
        flat += [min(group) == max(group) for group in rewards]
    return Outcome(statistics.fmean(flat), statistics.fmean(distances), learner.ability)


CONTENDERS: dict[str, tuple[CurriculumConfig | None, bool]] = {
    "rows at random": (None, False),
    "curriculum": (CurriculumConfig(), False),
    "curriculum, half-life 5": (CurriculumConfig(half_life=5), False),
    "curriculum, nothing fades": (CurriculumConfig(half_life=1e9), False),
    "curriculum, target 0.3": (CurriculumConfig(target=0.3), False),
    "all rates measured before": (CurriculumConfig(), True),
    "all rates measured before, nothing fades": (CurriculumConfig(half_life=1e9), True),
}
"""Each with whether a group of every row was run before the training."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args(argv)
    print("| rows drawn by | groups with equal rewards | distance to the target | ability at the end |")
    print("| --- | ---: | ---: | ---: |")
    for name, (config, measured) in CONTENDERS.items():
        outcomes = [
            simulate(config, rows=args.rows, steps=args.steps, seed=seed, measured=measured)
            for seed in range(args.seeds)
        ]
        columns = [_with_error(values) for values in zip(*outcomes, strict=True)]
        print(f"| {name} | {' | '.join(columns)} |")


def _with_error(values: tuple[float, ...]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.2f} ± {error:.2f}"


if __name__ == "__main__":
    main()
