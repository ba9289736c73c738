"""Intervals, p values, power and pass@k against plain Python, and how often they are wrong in made runs.

The same numbers were compared with SciPy 1.17.1 once (`stats.t`, `binomtest`, `permutation_test`, `special.betainc`): they differ
by less than 1e-10.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from fractions import Fraction

import pytest

from gymgate.results.compare import compare, verdict
from gymgate.rollouts.outcome import Outcome
from gymgate.runs.counted import statistics as st
from gymgate.runs.counted.tasks import CollectedTasks, Task, TaskScore

UNBOUNDED = (-math.inf, math.inf)


def t_below(t: float, freedom: int) -> float:
    """Probability that |T| < t, by the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    term, total = (math.cos(angle), math.cos(angle)) if freedom % 2 else (1.0, 1.0)
    for step in range(2 + freedom % 2, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (step - 1) / step
        total += term
    if freedom % 2:
        return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
    return math.sin(angle) * total


def at_least(passed: int, count: int, share: float) -> float:
    """Probability of that many passes or more, by exact sums."""
    p = Fraction(share)
    ways = (math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(passed, count + 1))
    return float(sum(ways, Fraction(0)))


def flipped_p(sums: Sequence[int]) -> float:
    totals = [
        sum(sign * size for sign, size in zip(signs, sums, strict=True))
        for signs in itertools.product((1, -1), repeat=len(sums))
    ]
    return sum(abs(total) >= abs(sum(sums)) for total in totals) / len(totals)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 29, 60, 199, 1000])
def test_the_t_quantile_leaves_out_a_twentieth(freedom: int) -> None:
    assert t_below(st.t_quantile(freedom), freedom) == pytest.approx(0.95, abs=1e-11)


def test_the_t_quantile_of_tables() -> None:
    """Of 300 tasks or more it is nearly the normal one."""
    known = {1: 12.7062, 2: 4.3027, 4: 2.7764, 7: 2.3646, 19: 2.0930, 120: 1.9799}
    assert {freedom: round(st.t_quantile(freedom), 4) for freedom in known} == known
    assert st.t_quantile(10**6) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-5)


@pytest.mark.parametrize("count", [1, 2, 5, 20, 60])
def test_the_binomial_interval_ends_where_the_passes_become_unlikely(count: int) -> None:
    for passed in sorted({0, 1, count // 2, count}):
        low, high = st.confidence_interval(passed / count, None, count, (0.0, 1.0))
        assert low is not None
        assert high is not None
        assert (low == 0, high == 1) == (passed == 0, passed == count)
        if passed:
            assert at_least(passed, count, low) == pytest.approx(0.025, abs=1e-9)
        if passed < count:
            assert 1 - at_least(passed + 1, count, high) == pytest.approx(0.025, abs=1e-9)


def test_one_task_with_nearly_every_rollout_right_has_an_interval() -> None:
    """Its upper end is closer to 1 than any other number."""
    for rate in (0.9, 0.95, 0.99):
        low, high = st.confidence_interval(rate, None, 1, (0.0, 1.0))
        mirrored = st.confidence_interval(1 - rate, None, 1, (0.0, 1.0))[1]
        assert (low, high) == (pytest.approx(1 - mirrored), pytest.approx(1))


@pytest.mark.parametrize("tiny", [5e-324, 1.2e-16, 1e-12])
def test_rewards_as_good_as_none_or_all_have_the_interval_of_these(tiny: float) -> None:
    """They ended a comparison with a division by zero."""
    none, everything = (st.confidence_interval(mean, None, 2, (0.0, 1.0)) for mean in (0.0, 1.0))
    assert st.confidence_interval(tiny, None, 2, (0.0, 1.0)) == pytest.approx(none)
    assert st.confidence_interval(1 - tiny, None, 2, (0.0, 1.0)) == pytest.approx(everything)


def test_intervals_that_tasks_say_nothing_of() -> None:
    assert st.confidence_interval(None, None, 0, (0.0, 1.0)) == (None, None)
    assert st.confidence_interval(0.5, None, 3, UNBOUNDED) == (None, None)
    low, high = st.confidence_interval(-0.5, 0.1, 3, UNBOUNDED)
    assert (low, high) == (pytest.approx(-0.5 - 0.43027, abs=1e-5), pytest.approx(-0.5 + 0.43027, abs=1e-5))
    assert st.confidence_interval(0.9, 0.1, 3, (0.0, 1.0))[1] == 1
    for equal in ([0.1, 0.1, 0.1], [0.3, 0.1 + 0.2], [5.0], []):
        assert st.standard_error(equal) is None
        assert st.clustered_error([[value] * 3 for value in equal]) is None


def test_random_runs_are_as_in_plain_python() -> None:
    """300 runs of up to eight tasks: sign-flip p, clustered error, and pass@k of graded and of negative rewards."""
    dice = random.Random(7)
    for _ in range(300):
        count, repeats = dice.randint(1, 8), dice.randint(1, 4)
        sums = [dice.randint(-repeats, repeats) for _ in range(count)]
        assert st.sign_flip_p([float(total) for total in sums]) == pytest.approx(flipped_p(sums), abs=1e-12)
        rewards = [
            dice.choice((0.0, 0.25, 1.0, -2.0, dice.uniform(-1, 1))) for _ in range(dice.randint(1, 7))
        ]
        for k in range(1, len(rewards) + 1):
            best = [max(drawn) for drawn in itertools.combinations(rewards, k)]
            expected = sum(map(Fraction, best)) / len(best)
            assert st.pass_at_k(rewards, k) == pytest.approx(float(expected), abs=1e-12)
        tasks = [[dice.uniform(-1, 1) for _ in range(repeats)] for _ in range(count + 1)]
        error = statistics.stdev(map(statistics.fmean, tasks)) / math.sqrt(count + 1)
        assert st.clustered_error(tasks) == pytest.approx(error)


def test_p_of_graded_differences_does_not_depend_on_rounding() -> None:
    """0.1 + 0.2 - 0.3 is not 0 in floating point, and ties with it are."""
    assert st.sign_flip_p([0.1, 0.2, -0.3]) == 1.0
    assert st.sign_flip_p([0.1, 0.2, 0.3]) == 0.25
    assert st.sign_flip_p([0.3, 0.1 + 0.2, -0.3]) == flipped_p([1, 1, -1]) == 1.0
    assert st.sign_flip_p([0.1] * 30) == st.sign_flip_p([1e90] * 30) == st.sign_flip_p([1.0] * 30) == 1e-4
    assert st.sign_flip_p([0.1, 0.2, -0.3] * 10) == 1.0
    assert st.sign_flip_p([]) == st.sign_flip_p([0.0] * 40) == 1.0
    assert st.sign_flip_p([5e-324] * 30) == st.sign_flip_p([1e100] * 30) == 1e-4


@pytest.mark.parametrize(("up", "down"), [(15, 5), (16, 6), (35, 25), (200, 160), (3000, 2900)])
def test_sampled_p_is_close_to_mcnemars(up: int, down: int) -> None:
    expected = 2 * at_least(up, up + down, 0.5)
    sampled = st.sign_flip_p([1.0] * up + [-1.0] * down + [0.0] * 10)
    assert sampled == pytest.approx(expected, abs=4 * math.sqrt(expected / 9999))
    assert sampled == st.sign_flip_p([1.0] * up + [-1.0] * down), "the same samples each time"


@pytest.mark.timeout(30)
def test_many_tasks_have_a_p_value() -> None:
    assert st.sign_flip_p([1.0] * 20_000 + [-1.0] * 20_000) == 1.0
    assert st.sign_flip_p([0.5] * 4000) == 1e-4


def test_five_tasks_never_decide_and_six_can() -> None:
    assert [st.sign_flip_p([1.0] * count) <= st.LEVEL for count in range(8)] == [False] * 6 + [True] * 2
    assert st.FEWEST_TASKS == 6


@pytest.mark.parametrize("count", [2, 5, 6, 8, 11])
def test_of_all_signs_at_most_a_twentieth_decides(count: int) -> None:
    """Exactly, whatever the sizes are."""
    dice = random.Random(count)
    for sizes in ([1.0] * count, [dice.uniform(0, 1) for _ in range(count)]):
        ps = [
            st.sign_flip_p([sign * size for sign, size in zip(signs, sizes, strict=True)])
            for signs in itertools.product((1, -1), repeat=count)
        ]
        assert sum(p <= st.LEVEL for p in ps) <= st.LEVEL * len(ps)


def collected(rewards: Sequence[Sequence[float]], *, failed: int = 0) -> CollectedTasks:
    """A run with a row for each list of rewards; the last `failed` rollouts failed permanently."""
    run = CollectedTasks()
    left = sum(map(len, rewards)) - failed
    for number, group in enumerate(rewards):
        task = Task("e", f"{number:016x}", 0, "a", number, "", number + 1)
        orders = [(-1, repeat) for repeat in range(len(group))]
        counted = max(0, min(left, len(group)))
        task.scores = [
            TaskScore(order, Outcome(True, True, True, False, "completed", reward), None)
            for order, reward in zip(orders[:counted], group, strict=False)
        ]
        task.failures = dict.fromkeys(orders[counted:], "gone")
        left -= len(group)
        run.tasks[task.key] = task
    return run


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("rows", [2, 3, 5, 6, 8, 12, 20, 50])
def test_a_policy_is_rarely_better_than_itself(rows: int, repeats: int) -> None:
    dice = random.Random(f"{rows} rows, {repeats} repeats")
    winners = 0
    for _ in range(300):
        rates = [dice.random() for _ in range(rows)]
        runs = [
            collected([[float(dice.random() < rate) for _ in range(repeats)] for rate in rates]) for _ in "AB"
        ]
        [row] = compare(*runs).rows
        winners += "is better" in verdict(row, ("A", "B"))
    assert winners <= 0.05 * 300
    assert winners == 0 or rows > 5


@pytest.mark.parametrize(("rate", "effect"), [(0.3, 0.3), (0.5, 0.2)])
def test_the_rows_that_are_named_have_about_the_power(rate: float, effect: float) -> None:
    """Two independent rollouts of each row, one of each run, whose chances differ by the effect."""
    dice = random.Random(3)
    deviation = math.sqrt(rate * (1 - rate) + (rate + effect) * (1 - rate - effect))
    needed = st.tasks_needed(effect, deviation / math.sqrt(10), 10)
    assert needed is not None
    assert needed == pytest.approx((2.8016 * deviation / effect) ** 2 + 1.92, abs=1)
    found = 0
    for _ in range(150):
        sums = [float(dice.random() < rate + effect) - (dice.random() < rate) for _ in range(needed)]
        found += st.sign_flip_p(sums) <= st.LEVEL and sum(sums) > 0
    assert 0.7 <= found / 150 <= 0.9


def test_no_number_of_rows_shows_no_difference() -> None:
    assert st.tasks_needed(0.0, 0.1, 10) is None
    assert st.tasks_needed(-1.0, None, 3) == st.FEWEST_TASKS
    for rounding in (1e-17, 1e-160, 5e-324):
        assert st.tasks_needed(rounding, 0.3, 10) is None


@pytest.mark.parametrize(
    ("count", "rate", "least"),
    [
        (2, 0.5, 1.0),
        (5, 0.9, 0.999),
        (8, 0.5, 0.929),
        (20, 0.05, 0.999),
        (20, 0.5, 0.958),
        (50, 0.9, 0.878),
        (50, 0.97, 0.999),
    ],
)
def test_the_interval_of_a_pass_rate_covers_it(count: int, rate: float, least: float) -> None:
    """Exactly, over all numbers of passes of one rollout a task. `± 1.96 se` covers 40% at 5 tasks of 0.9, and 78% at 50 of 0.97;
    where some tasks fail, the t interval of so coarse a score covers a little less than 95%."""
    covered = 0.0
    for passed in range(count + 1):
        scores = [1.0] * passed + [0.0] * (count - passed)
        low, high = st.confidence_interval(passed / count, st.standard_error(scores), count, (0.0, 1.0))
        assert low is not None
        assert high is not None
        chance = math.comb(count, passed) * rate**passed * (1 - rate) ** (count - passed)
        covered += chance * (low <= rate <= high)
    assert covered >= least - 1e-9


@pytest.mark.parametrize("tasks", [8, 20, 50])
def test_bounds_with_their_intervals_hold_the_truth_where_hard_rows_fail(tasks: int) -> None:
    """Four rollouts of a row; the harder a row, the more of its rollouts run out of time. Leaving them out would look better."""
    dice = random.Random(tasks)
    covered, left_out = 0, []
    for _ in range(400):
        ends: list[list[float]] = [[], []]
        finished = []
        for _ in range(tasks):
            rate = dice.random()
            rewards = [float(dice.random() < rate) for _ in range(4)]
            lost = [dice.random() < (1 - rate) * 0.6 for _ in rewards]
            for means, failed_as in zip(ends, (0.0, 1.0), strict=True):
                means.append(
                    statistics.fmean(failed_as if gone else r for r, gone in zip(rewards, lost, strict=True))
                )
            finished += [r for r, gone in zip(rewards, lost, strict=True) if not gone]
        low, _ = st.confidence_interval(st.mean(ends[0]), st.standard_error(ends[0]), tasks, (0.0, 1.0))
        _, high = st.confidence_interval(st.mean(ends[1]), st.standard_error(ends[1]), tasks, (0.0, 1.0))
        assert low is not None
        assert high is not None
        covered += low <= 0.5 <= high
        left_out.append(statistics.fmean(finished) if finished else 0.5)
    assert covered >= 0.95 * 400
    assert statistics.fmean(left_out) > 0.55
