"""Runs as one HTML page: metrics, settings, tokens, charts, failures, and conversations side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gymgate.results.page import LONGEST_TEXT, Part, curve, histogram, shares, table, write_page
from gymgate.results.report_data import ReportData
from gymgate.rollouts.transcript import cut
from gymgate.runs.aggregate import Runs, read_tasks, refuse_empty
from gymgate.runs.costs import Prices, TokenUsage, refuse_price_of_replay
from gymgate.runs.metrics import REPLAYED, in_view, notes_on_tasks, summary_rows, task_rows
from gymgate.runs.settings import shown_settings
from gymgate.runs.tasks import CollectedTasks, Task

SHOWN_TASK_ROWS = 1000
SHOWN_NAMES = 5
TOKEN_COLUMNS = [column.name for column in dataclasses.fields(TokenUsage)]


def write_report(
    runs: Runs,
    output: Path,
    *,
    tasks: int = 50,
    per_task: int = 4,
    prices: Prices = MappingProxyType({}),
) -> None:
    """Write one HTML file about runs, with up to `per_task` conversations of each of the first `tasks` tasks, and with costs
    if there are prices.

    Reads every rollout once. Raises `ConfigError` for rollouts that are in two runs, and `DataError` if there is none or the file
    cannot be written.
    """
    data = ReportData(tasks, per_task)
    collected = read_tasks(runs, see=data.add, see_attempt=data.add_failure)
    refuse_empty(runs, collected)
    refuse_price_of_replay(prices, replayed=collected.replayed)
    write_page(output, title_of(collected), report_parts(runs, collected, data, prices))


def title_of(collected: CollectedTasks) -> str:
    """Model, environments and date, such as `m on mcqa, calendar, 2026-11-22`."""
    names = sorted({task.environment for task in collected.tasks.values()})
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    date = "" if collected.created is None else f", {datetime.fromtimestamp(collected.created, UTC):%Y-%m-%d}"
    return f"{policy_name(collected)} on {', '.join(names[:SHOWN_NAMES])}{more}{date}"


def policy_name(collected: CollectedTasks) -> str:
    """Return the model's name, or what took its place."""
    policy = collected.policy or {}
    if collected.replayed:
        return "recorded answers"
    return str(policy.get("model") or policy.get("name") or "policy") if policy else "rollouts"


def notes_of(collected: CollectedTasks) -> Iterator[Part]:
    """Yield what a reader of the numbers has to know."""
    if collected.replayed:
        yield {"note": REPLAYED}
    for note in collected.notes:
        yield {"note": note}


def report_parts(
    runs: Runs,
    collected: CollectedTasks,
    data: ReportData,
    prices: Prices = MappingProxyType({}),
    *,
    ended: bool = True,
) -> Iterator[Part]:
    """Yield the parts of a report; of runs that have not ended, without notes on tasks that lack rollouts."""
    yield from notes_of(collected)
    for note in notes_on_tasks(collected) if ended else ():
        yield {"note": note}
    yield {"heading": "Environments"}
    summary = summary_rows(collected)
    yield table(summary, in_view(summary))
    yield table(summary, fold="All metrics")
    yield {"heading": "Rollouts"}
    for title, values in data.charts.items():
        yield histogram(title, values)
    yield shares("Where the time goes", data.times, "s")
    rewards = [rewards for task in collected.ordered() if (rewards := task.rewards())]
    yield curve("Mean reward of each task, lowest first, with its range", rewards)
    usages = [dataclasses.asdict(usage) for usage in collected.usage.rows(prices)]
    yield table(usages, [name for name in TOKEN_COLUMNS if name != "cost" or prices])
    if data.failures:
        yield {"heading": "Failed attempts"}
        yield table(
            [
                {
                    "class": kind,
                    "error": name,
                    "count": count,
                    "first message": cut(data.messages[kind, name], LONGEST_TEXT),
                }
                for (kind, name), count in data.failures.most_common()
            ]
        )
    yield {"heading": "Conversations"}
    yield {"filters": {}}
    for key, rollouts in data.shown.items():
        task = collected.tasks[key]
        name = f"{_name(task, data)}: {_all_rewards(task)}"
        yield {"task": {"environment": task.environment, "name": name}, "key": "/".join(map(str, key))}
        yield from rollouts
    yield {"heading": "Tasks"}
    if (count := len(collected.tasks)) > SHOWN_TASK_ROWS:
        yield {"note": f"The first {SHOWN_TASK_ROWS} of {count}; gymgate aggregate -o writes all."}
    yield table([*islice(_task_rows(collected, data), SHOWN_TASK_ROWS)])
    yield {"heading": "Settings"}
    yield table([{"setting": "runs", "value": ", ".join(map(str, runs.given))}, *_settings(runs)])


def _task_rows(collected: CollectedTasks, data: ReportData) -> Iterator[dict[str, Any]]:
    for task, row in zip(collected.ordered(), task_rows(collected), strict=True):
        passes = {name: value for name, value in row.items() if name.startswith(("pass@", "maj@"))}
        means = {name: row[name] for name in ("mean_calls", "mean_output_tokens", "mean_seconds")}
        name, rewards = _name(task, data), _all_rewards(task)
        yield {"task": name, "rewards": rewards, "mean_reward": row["mean_reward"], **passes, **means}


def _name(task: Task, data: ReportData) -> str:
    opening = data.openings.get(task.key, "")
    return f"{task.name} {opening}".strip()


def _all_rewards(task: Task) -> str:
    """Return the reward of every rollout, or why there is none."""
    outcomes = [score.outcome for score in sorted(task.scores, key=lambda score: score.order)]
    rewards = [each.reason if each.reward is None else f"{each.reward:.4g}" for each in outcomes]
    return ", ".join([*rewards, *["failed"] * task.failed])


def _settings(runs: Runs) -> Iterator[dict[str, Any]]:
    """Yield each setting with its value, or values where runs differ; who gets the page sees no secret."""
    values: dict[str, dict[str, None]] = {}
    for run in runs.runs:
        for name, value in shown_settings(run.settings).items():
            values.setdefault(name, {})[str(value)] = None
    yield from ({"setting": name, "value": " | ".join(found)} for name, found in values.items())
