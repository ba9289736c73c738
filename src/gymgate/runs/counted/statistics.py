"""Metrics of a set of rollouts, defined as by NeMo Gym and the pass@k paper. Pure functions.

A task's scores are in the order of its rollouts (seed, then repeat); rollouts without a reward are left out.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

Z95 = 1.959963984540054
"""Half the width of a 95 % confidence interval, in standard errors."""


def is_binary(scores: Sequence[float]) -> bool:
    """Whether every score is 0 or 1."""
    return all(score in (0.0, 1.0) for score in scores)


def pass_at_k(scores: Sequence[float], k: int) -> float | None:
    """Probability that at least one of k rollouts passes; `None` for fewer than k scores.

    The unbiased estimate `1 - C(n-c, k) / C(n, k)` for c passes among n (Chen et al., 2021). For scores that are not all
    0 or 1: the best of the first k, as in NeMo Gym. For k=1: the mean (NeMo Gym's `pass@1[avg-of-n]`).
    """
    count = len(scores)
    if k < 1 or count < k:
        return None
    if k == 1:
        return math.fsum(scores) / count
    if not is_binary(scores):
        return max(scores[:k])
    wrong = sum(1 for score in scores if not score)
    if wrong < k:
        return 1.0
    return 1.0 - math.comb(wrong, k) / math.comb(count, k)


def majority_at_k(scores: Sequence[float], answers: Sequence[str | None], k: int) -> float:
    """Score of the most frequent answer of the first k rollouts: the mean of those that tie, 0 if there is no answer.

    As in NeMo Gym, the same answer with two different scores counts as two answers.
    """
    given = Counter(
        (answer, score) for answer, score in zip(answers[:k], scores[:k], strict=True) if answer is not None
    )
    if not given:
        return 0.0
    most = max(given.values())
    tied = [score for (_, score), votes in given.items() if votes == most]
    return sum(tied) / len(tied)


def mean(values: Sequence[float]) -> float | None:
    """`None` for no values."""
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (over n-1); `None` for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; `None` for fewer than two."""
    spread = deviation(values)
    return None if spread is None else spread / math.sqrt(len(values))


def clustered_error(tasks: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all scores, where those of one task belong together; `None` for less than two tasks.

    With equally many scores of each task it is the standard error of the tasks' means.
    """
    scored = [scores for scores in tasks if scores]
    count = sum(map(len, scored))
    if len(scored) < 2:
        return None
    overall = math.fsum(score for scores in scored for score in scores) / count
    squares = math.fsum(math.fsum(score - overall for score in scores) ** 2 for scores in scored)
    return math.sqrt(squares * len(scored) / (len(scored) - 1)) / count


def run_means(tasks: Sequence[Sequence[float]]) -> list[float]:
    """Mean over all tasks of the first rollouts, of the second ones, and so on, as far as every task has one."""
    shortest = min(map(len, tasks), default=0)
    return [math.fsum(scores[run] for scores in tasks) / len(tasks) for run in range(shortest)]


def default_ks(longest: int) -> list[int]:
    """1, 2, 4, 8, ... and the longest."""
    ks = [1 << power for power in range(max(longest, 1).bit_length())]
    return sorted({k for k in ks if k <= longest} | {longest}) if longest else []
