"""Metrics of a set of rollouts, defined as by NeMo Gym and the pass@k paper. Pure functions.

A task's scores are in the order of its rollouts (seed, then repeat); rollouts without a reward are left out.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

LEVEL = 0.05
"""Largest two-sided p of a difference that is not called chance; what a 95% interval leaves out."""
FEWEST_TASKS = 6
"""Rows with a difference of which a sign-flip test can decide: the p of five is at least 2 / 2^5."""
_EXACT_TASKS = 19
"""Rows up to which every combination of signs is counted; of more rows samples are drawn."""
_SAMPLES = 9999
_BITS = 24
"""Precision of differences in samples."""


def is_binary(scores: Sequence[float]) -> bool:
    """Whether every score is 0 or 1."""
    return all(score in (0.0, 1.0) for score in scores)


def pass_at_k(scores: Sequence[float], k: int) -> float | None:
    """Probability that at least one of k rollouts passes; `None` for fewer than k scores.

    The unbiased estimate `1 - C(n-c, k) / C(n, k)` for c passes among n (Chen et al., 2021). For scores that are not all
    0 or 1: the mean of the best of k over all choices of k, `sum of x_i C(i-1, k-1) / C(n, k)` for the i-th smallest score
    x_i, which is the same for 0 and 1 (NeMo Gym: the best of the first k). For k=1: the mean (NeMo Gym's
    `pass@1[avg-of-n]`).
    """
    count = len(scores)
    if k < 1 or count < k:
        return None
    if k == 1:
        return math.fsum(scores) / count
    if not is_binary(scores):
        share, best = k / count, []  # of the choices of k, those whose best is the largest score
        for place, score in zip(range(count, k - 1, -1), sorted(scores, reverse=True), strict=False):
            best.append(share * score)
            share *= (place - k) / max(place - 1, 1)
        return math.fsum(best)
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
    """Standard error of the mean of independent values, `deviation / sqrt(n)`; `None` for fewer than two, or equal ones, which
    say nothing of it."""
    spread = deviation(values)
    return None if spread is None else _unless_zero(spread / math.sqrt(len(values)), values)


def clustered_error(tasks: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all scores, where those of one task belong together; `None` for less than two tasks, or
    tasks that do not vary.

    `sqrt(T / (T-1) * sum of (s_t - n_t m)^2) / n` for T tasks with the sum s_t of n_t scores each, n scores and the mean m
    (Liang and Zeger, 1986; Miller, 2024). With equally many scores of each task it is the standard error of the tasks' means.
    """
    scored = [scores for scores in tasks if scores]
    count = sum(map(len, scored))
    if len(scored) < 2:
        return None
    overall = math.fsum(score for scores in scored for score in scores) / count
    squares = math.fsum(math.fsum(score - overall for score in scores) ** 2 for scores in scored)
    error = math.sqrt(squares * len(scored) / (len(scored) - 1)) / count
    return _unless_zero(error, [score for scores in scored for score in scores])


def _unless_zero(error: float, values: Sequence[float]) -> float | None:
    """Return an error, or `None` if it is 0 or no more than what rounding leaves."""
    return error if error > 1e-12 * max(map(abs, values)) else None


def confidence_interval(
    mean: float | None, error: float | None, count: int, bounds: tuple[float, float]
) -> tuple[float | None, float | None]:
    """95% confidence interval of a mean over tasks that lies between bounds, infinite ones included; `None` where the tasks do
    not say how wide it is.

    `mean ± t(0.975; count-1) * error` (Student, 1908), cut at the bounds. Without an error, because tasks do not vary, and with
    finite bounds: the exact binomial interval, with each task as one trial (Clopper and Pearson, 1934).
    """
    low, high = bounds
    if mean is None or (error is None and not math.isfinite(high - low)):
        return None, None
    if error is not None:
        half = t_quantile(count - 1) * error
        return max(low, mean - half), min(high, mean + half)
    passed = round(count * (mean - low) / (high - low), 12)  # what is as good as none or all has no quantile
    least = beta_quantile(LEVEL / 2, passed, count - passed + 1) if passed else 0.0
    most = beta_quantile(1 - LEVEL / 2, passed + 1, count - passed) if passed < count else 1.0
    return low + least * (high - low), low + most * (high - low)


def t_quantile(freedom: int) -> float:
    """0.975 quantile of Student's t: t^2 / (t^2 + f) has the beta distribution of 1/2 and f/2 (DLMF 8.17, A&S 26.5.27)."""
    share = beta_quantile(1 - LEVEL, 0.5, freedom / 2)
    return math.sqrt(freedom * share / (1 - share))


@functools.lru_cache(maxsize=4096)
def beta_quantile(p: float, a: float, b: float) -> float:
    """x for which the regularized incomplete beta function I_x(a, b) is p, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if incomplete_beta(middle, a, b) < p else (low, middle)
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b) for 0 < x <= 1, by its continued fraction (DLMF 8.17.22)."""
    if x == 1:  # as close as a number comes to a quantile above it
        return 1.0
    if x > (a + 1) / (a + b + 2):  # where it converges slowly
        return 1 - incomplete_beta(1 - x, b, a)
    fraction = 1.0
    for n in range(30 + 4 * math.isqrt(int(a + b)), 0, -1):
        m = n // 2
        upper = -(a + m) * (a + b + m) if n % 2 else m * (b - m)
        fraction = 1 + upper * x / ((a + n - 1) * (a + n)) / fraction
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a / fraction


def sign_flip_p(sums: Sequence[float]) -> float:
    """Two-sided p value of the sign-flip permutation test, given the sum of each row's differences (Fisher, 1935).

    If two runs do not differ, each sum may as well have the other sign: p is the share of all combinations of signs whose total
    is as far from 0. Of 20 or more sums other than 0 combinations are sampled, the same ones each time, and the seen one counts
    as one of them (Phipson and Smyth, 2010). Pairs of one row may depend on each other. With sums of 1 and -1 it is McNemar's
    exact test.
    """
    sums = [total for total in sums if total]
    sizes = [abs(total) for total in sums]
    if len(sums) <= _EXACT_TASKS:
        limit = abs(math.fsum(sums)) - 1e-9 * math.fsum(sizes)
        # The totals of every second size with every combination of signs, and those of the other sizes.
        halves = [[0.0], [0.0]]
        for place, size in enumerate(sizes):
            halves[place % 2] = [total + sign * size for total in halves[place % 2] for sign in (1, -1)]
        others = sorted(halves[1])
        tail = sum(len(others) - bisect_left(others, limit - total) for total in halves[0])
        return min(1.0, 2 * tail / (1 << len(sums)))
    # Bit b of all sizes as one integer: a sample takes as many counts of bits, whatever the number of rows. Scaled by a power of
    # two, sums of 0 and 1 have few bits.
    shift = _BITS - math.frexp(max(sizes))[1]
    whole = [round(math.ldexp(size, shift)) for size in sizes]
    bits = [(1 << b, int("".join(str(size >> b & 1) for size in whole), 2)) for b in range(_BITS + 1)]
    planes = [(weight, plane) for weight, plane in bits if plane]
    limit = math.ldexp(abs(math.fsum(sums)), shift) - len(sums)
    total, dice, extreme = sum(whole), random.Random(0), 0
    for _ in range(_SAMPLES):
        signs = dice.getrandbits(len(sums))
        flipped = sum(weight * (signs & plane).bit_count() for weight, plane in planes)
        extreme += abs(total - 2 * flipped) >= limit
    return (extreme + 1) / (_SAMPLES + 1)


def tasks_needed(difference: float, error: float | None, count: int) -> int | None:
    """About how many rows would show a difference in 8 of 10 comparisons (80% power), given that of `count` rows and its error.

    `((z(0.975) + z(0.8)) s / d)^2 + z(0.975)^2 / 2` for the rows' deviation s (Guenther, 1981); `None` for no difference, and
    where it takes a billion rows, as with what rounding leaves.
    """
    if not difference:
        return None
    z, power = (statistics.NormalDist().inv_cdf(p) for p in (1 - LEVEL / 2, 0.8))
    ratio = (z + power) * ((error or 0.0) / difference)
    rows = ratio * ratio * count + z * z / 2
    return max(FEWEST_TASKS, math.ceil(rows)) if rows < 1e9 else None


def run_means(tasks: Sequence[Sequence[float]]) -> list[float]:
    """Mean over all tasks of the first rollouts, of the second ones, and so on, as far as every task has one."""
    shortest = min(map(len, tasks), default=0)
    return [math.fsum(scores[run] for scores in tasks) / len(tasks) for run in range(shortest)]


def default_ks(longest: int) -> list[int]:
    """1, 2, 4, 8, ... and the longest."""
    ks = [1 << power for power in range(max(longest, 1).bit_length())]
    return sorted({k for k in ks if k <= longest} | {longest}) if longest else []
