"""Metrics per task, per environment and overall, as rows of a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gymgate.core.errors import OptionError
from gymgate.runs.counted import statistics as st
from gymgate.runs.counted.account import Account
from gymgate.runs.counted.counts import NOT_SCORED, OVERALL
from gymgate.runs.counted.tasks import CollectedTasks, Task

REPLAYED = "Recorded answers were replayed: the rewards say nothing about a model."


def task_rows(collected: CollectedTasks) -> Iterator[dict[str, Any]]:
    """A row per task: counts, mean and deviation of its rewards, pass@k, maj@k."""
    for task in collected.ordered():
        rewards = task.rewards()
        row: dict[str, Any] = {
            "environment": task.environment,
            "agent": task.agent,
            "row_key": task.row_key,
            "occurrence": task.occurrence,
            "source": task.source,
            "line": task.line,
            "label": task.name,
            **Account.of([task], collected).columns(),
            "mean_reward": st.mean(rewards),
            "std_reward": st.deviation(rewards),
            "min_reward": min(rewards, default=None),
            "max_reward": max(rewards, default=None),
        }
        for k in st.default_ks(len(rewards)):
            row[f"pass@{k}"] = st.pass_at_k(rewards, k)
            if task.environment in collected.answer_keys:
                row[f"maj@{k}"] = _vote(task, k)
        row["mean_calls"] = task.calls.mean
        row["mean_output_tokens"] = task.output_tokens.mean
        row["mean_seconds"] = task.seconds.mean
        row["rewards"] = rewards
        yield row


def summary_rows(collected: CollectedTasks, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """A row per environment and, if there are several, one over all tasks.

    All of a row's pass@k, maj@k and what describes their spread are over the same tasks, `scored_tasks` of them: those
    with a scored rollout. So k ends at `max_k`, the fewest scored rollouts of such a task. `ks` chooses other k, and only
    the tasks that have rollouts for each of them.
    """
    tasks = collected.ordered()
    names = sorted({task.environment for task in tasks})
    rows = [
        _summary(name, [task for task in tasks if task.environment == name], collected, ks) for name in names
    ]
    return [*rows, _summary(OVERALL, tasks, collected, ks)] if len(names) > 1 else rows


def numbered(prefix: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of rows that are a prefix and a number, such as `pass@8`, the smallest number first."""
    names = {
        name for row in rows for name in row if name.startswith(prefix) and name[len(prefix) :].isdigit()
    }
    return sorted(names, key=lambda name: int(name[len(prefix) :]))


def keep(collected: CollectedTasks, low: float, high: float) -> Iterator[Task]:
    """The tasks whose mean reward lies between two bounds, both included."""
    for task in collected.ordered():
        mean = st.mean(task.rewards())
        if mean is not None and low <= mean <= high:
            yield task


def parse_bounds(text: str) -> tuple[float, float]:
    """`LOW..HIGH`, either may be left out. Raises `OptionError`."""
    low, dots, high = text.partition("..")
    try:
        bounds = float(low or "-inf"), float(high or "inf")
    except ValueError:
        dots = ""
    if not dots or not bounds[0] <= bounds[1]:
        raise OptionError(f"--keep {text!r}: write LOW..HIGH, e.g. 0.1..0.9")
    return bounds


def parse_ks(text: str) -> tuple[int, ...]:
    """`K,...`. Raises `OptionError`."""
    ks = [item.strip() for item in text.split(",")]
    if not all(k.isdecimal() and int(k) > 0 for k in ks):
        raise OptionError(f"-k {text!r}: write one number or several, e.g. 1,8")
    return tuple(sorted({int(k) for k in ks}))


def in_view(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that are shown at once: those that say how good the policy is, and what is missing."""
    counts = [name for name in (*NOT_SCORED, "no_answer") if any(row[name] for row in summary)]
    scored = ["scored_tasks"] if any(row["scored_tasks"] != row["tasks"] for row in summary) else []
    means = ("mean_reward", "mean_reward_se", *numbered("pass@", summary))
    return ["environment", "tasks", *scored, "rollouts", *counts, *means]


def _summary(
    name: str, tasks: Sequence[Task], collected: CollectedTasks, ks: Sequence[int] | None
) -> dict[str, Any]:
    every = [reward for task in tasks for reward in task.rewards()]
    measured = [task for task in tasks if len(task.rewards()) >= max(ks or (1,))]
    scored = [task.rewards() for task in measured]
    max_k = min(map(len, scored), default=0)
    means = [math.fsum(rewards) / len(rewards) for rewards in scored]
    runs = st.run_means(scored)
    mean, error = st.mean(means), st.standard_error(means)
    is_cut = all(0 <= reward <= 1 for reward in every) and (error is not None or st.is_binary(every))
    bounds = (0.0, 1.0) if is_cut else (-math.inf, math.inf)
    low, high = st.confidence_interval(mean, error, len(means), bounds)
    account = Account.of(tasks, collected)
    row: dict[str, Any] = {
        "environment": name,
        "account": str(account),
        "tasks": len(tasks),
        "scored_tasks": len(scored),
        "max_k": max_k,
        **account.columns(),
        "mean_reward": st.mean(every),
        "mean_reward_se": st.clustered_error([task.rewards() for task in tasks]),
        "std_reward": st.deviation(every),
        "pass@1": mean,
        "pass@1_se": error,
        "pass@1_ci95_low": low,
        "pass@1_ci95_high": high,
        "pass@1_std_runs": st.deviation(runs),
        "pass@1_se_runs": st.standard_error(runs),
        "task_std": st.mean([st.deviation(rewards) or 0.0 for rewards in scored]) if max_k > 1 else None,
    }
    votes = all(task.environment in collected.answer_keys for task in measured)
    for k in (ks or st.default_ks(max_k)) if scored else ():
        if k > 1:
            values = [value for rewards in scored if (value := st.pass_at_k(rewards, k)) is not None]
            row[f"pass@{k}"], row[f"pass@{k}_se"] = st.mean(values), st.standard_error(values)
        if votes:
            values = [_vote(task, k) for task in measured]
            row[f"maj@{k}"], row[f"maj@{k}_se"] = st.mean(values), st.standard_error(values)
    return row


def _vote(task: Task, k: int) -> float:
    return st.majority_at_k(task.rewards(), [score.answer for score in task.measured()], k)
