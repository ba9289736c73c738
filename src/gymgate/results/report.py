"""Runs as one HTML page: metrics, settings, tokens, charts, failures, and conversations side by side.

`page` makes the parts of the page, and page.js draws each kind of part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gymgate.results.page import LONGEST_TEXT, Part, curve, histogram, shares, table, task_parts, write_page
from gymgate.results.report_data import LONGEST_NAME, REWARD, ReportData
from gymgate.rollouts.row import TaskKey
from gymgate.rollouts.transcript import cut
from gymgate.runs.counted.aggregate import RunTable, read_runs
from gymgate.runs.counted.costs import TokenUsage
from gymgate.runs.counted.metrics import REPLAYED, in_view, summary_rows, task_rows
from gymgate.runs.counted.tasks import CollectedTasks, Task
from gymgate.runs.described.prices import Prices, refuse_price_of_replay
from gymgate.runs.described.settings import example_note, policy_name, shown_settings
from gymgate.runs.stored.score import NO_ANSWER

SHOWN_TASK_ROWS = 1000
SHOWN_NAMES = 5
Explain = Callable[[Sequence[Mapping[str, Any]], str | None], Iterable[str]]
"""From metrics of environments and NeMo Gym's release to sentences on them."""
TOKEN_COLUMNS = [column.name for column in dataclasses.fields(TokenUsage)]


def write_report(
    paths: Iterable[Path],
    output: Path,
    *,
    first_of_overlap: bool = False,
    failed_as: float | None = None,
    tasks: int = 50,
    per_task: int = 4,
    prices: Prices = MappingProxyType({}),
    command: str = "",
    explain: Explain | None = None,
) -> None:
    """Write one HTML file about the runs at `paths`, with up to `per_task` conversations of each of the first `tasks` tasks, with
    costs if there are prices, with the command that makes it again, and with what `explain` says of the metrics.

    Reads every rollout once. Raises `ConfigError` for rollouts that are in two runs, and `DataError` if there is none or the file
    cannot be written.
    """
    data = ReportData(tasks, per_task)
    runs = read_runs(
        paths,
        first_of_overlap=first_of_overlap,
        failed_as=failed_as,
        see=data.add,
        see_attempt=data.add_failure,
    )
    runs.refuse_empty()
    refuse_price_of_replay(prices, replayed=runs.replayed)
    write_page(output, title_of(runs), report_parts(runs, data, prices, command=command, explain=explain))


def title_of(runs: RunTable) -> str:
    """Model, environments and date, such as `m on mcqa, calendar, 2026-11-22`."""
    names = sorted({task.environment for task in runs.tasks.tasks.values()})
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    date = "" if runs.created is None else f", {datetime.fromtimestamp(runs.created, UTC):%Y-%m-%d}"
    return f"{policy_name(runs.policy)} on {', '.join(names[:SHOWN_NAMES])}{more}{date}"


def notes_of(runs: RunTable) -> Iterator[Part]:
    """Yield what a reader of the numbers has to know."""
    if runs.replayed:
        yield {"note": REPLAYED}
    for note in runs.notes:
        yield {"note": note}


def report_parts(
    runs: RunTable,
    data: ReportData,
    prices: Prices = MappingProxyType({}),
    *,
    command: str = "",
    explain: Explain | None = None,
) -> Iterator[Part]:
    """Yield the parts of a report."""
    collected = runs.tasks
    summary = summary_rows(collected)
    for row in summary[: None if len(summary) == 1 else -1]:
        yield {"headline": _headline(row, policy_name(runs.policy), is_example=runs.is_example)}
    yield from notes_of(runs)
    if explain is not None:
        yield from ({"note": note} for note in explain(summary, runs.runs[0].settings.get("nemo_gym")))
    yield {"heading": "Environments"}
    yield table(summary, _scores_first(in_view(summary)))
    yield from ({"account": row["account"]} for row in summary[-1:] if len(summary) > 1)
    most = max((len(task.scores) + task.failed for task in collected.tasks.values()), default=0)
    if summary and 0 < (k := summary[-1]["max_k"]) < most:
        yield {"note": f"pass@k ends at k = {k}: a task has no more scored rollouts than that, of {most}"}
    yield table(summary, fold="All metrics")
    yield {"heading": "Rollouts"}
    rewards = [
        rewards for task in collected.ordered() if (rewards := task.rewards())
    ]  # failed ones, too, if they count
    for title, values in {**data.charts, REWARD: [*chain.from_iterable(rewards)]}.items():
        if values and min(values) < max(values):  # one value says nothing that the table does not
            yield histogram(title, values)
    if any(data.times.values()):
        yield shares("What rollouts spend their time on", data.times, "s")
    if rewards:
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
    if broken := collected.broken_environments:
        checked = ", ".join(sorted(broken))
        yield {"note": f"gymgate check ENV shows file and line of an exception of its servers: {checked}"}
    yield {"heading": "Conversations"}
    conversations = sum(map(len, data.conversations.values()))
    if conversations < sum(len(task.scores) + task.failed for task in collected.tasks.values()):
        limits = f"Up to {data.per_task} rollouts of each of the first {data.tasks} tasks"
        yield {"note": f"{limits}; --per-task and --tasks change that."}
    yield {"filters": {}}
    names = data.task_names(collected.tasks.values())
    for task in collected.ordered():
        if rollouts := data.conversations.get(task.key):
            name = f"{names[task.key]}: {_all_rewards(task)}"
            parts = [rollout.part for rollout in rollouts]
            yield from task_parts(task.environment, name, parts, str(task.key))
    yield {"heading": "Tasks"}
    if (count := len(collected.tasks)) > SHOWN_TASK_ROWS:
        yield {"note": f"The first {SHOWN_TASK_ROWS} of {count}; gymgate aggregate -o writes all."}
    yield table([*islice(_task_rows(collected, data, names), SHOWN_TASK_ROWS)])
    yield {"heading": "Settings"}
    origin = {"runs": ", ".join(map(str, runs.paths)), **({"this page": command} if command else {})}
    yield table([*({"setting": name, "value": value} for name, value in origin.items()), *_settings(runs)])


def _headline(row: Mapping[str, Any], model: str, *, is_example: bool) -> str:
    """Say the result of an environment, and what it is made of, in a sentence."""
    score = "no reward that counts"
    if row["mean_reward"] is not None:
        error = "" if row["mean_reward_se"] is None else f" ± {row['mean_reward_se']:.3f}"
        score = f"mean reward {row['mean_reward']:.3f}{error}"
    if (low := row["mean_if_failed_0"]) is not None:
        score += f" ({low:.3f} to {row['mean_if_failed_1']:.3f} if the failed rollouts had got 0 to 1)"
    warning = f" {example_note(row['tasks'])}." if is_example else ""
    return f"{model} on {row['environment']}, {row['tasks']} rows: {score}; {row['account']}.{warning}"


def _scores_first(columns: Sequence[str]) -> list[str]:
    """Return the columns with the scores after the environment: a narrow screen shows no more than the first few."""
    scores = [name for name in columns if name.startswith(("mean_", "pass@"))]
    return [columns[0], *scores, *(name for name in columns[1:] if name not in scores)]


def _task_rows(
    collected: CollectedTasks, data: ReportData, names: Mapping[TaskKey, str]
) -> Iterator[dict[str, Any]]:
    for task, row in zip(collected.ordered(), task_rows(collected), strict=True):
        ks = {name: value for name, value in row.items() if name.startswith(("pass@", "maj@"))}
        passes = {name: value for name, value in ks.items() if name not in ("pass@1", "maj@1")}
        means = {name: row[name] for name in ("mean_calls", "mean_output_tokens", "mean_seconds")}
        answers = {"expected": data.expected.get(task.key), "extracted": _all_answers(task)}
        texts = {name: answer for name, answer in answers.items() if answer}
        rewards = {"mean_reward": row["mean_reward"], "rewards": _all_rewards(task)}
        yield {"task": names[task.key], **rewards, **texts, **passes, **means}


def _all_answers(task: Task) -> str:
    """Return the different answers that the environment took from the rollouts, without those kept as a hash."""
    texts = ("none" if score.remark == NO_ANSWER else score.answer for score in task.scores)
    answers = {text for text in texts if text and len(text) < LONGEST_NAME}
    return cut(", ".join(sorted(answers)), LONGEST_NAME)


def _all_rewards(task: Task) -> str:
    """Return the reward of every rollout, or why there is none."""
    outcomes = [score.outcome for score in sorted(task.scores, key=lambda score: score.order)]
    rewards = [outcome.reason if outcome.reward is None else f"{outcome.reward:.4g}" for outcome in outcomes]
    return ", ".join([*rewards, *["failed"] * task.failed])


def _settings(runs: RunTable) -> Iterator[dict[str, Any]]:
    """Yield each setting with its value, or values where runs differ; who gets the page sees no secret."""
    values: dict[str, dict[str, None]] = {}
    for run in runs.runs:
        for name, value in shown_settings(run.settings).items():
            values.setdefault(name, {})[str(value)] = None
    yield from (
        {"setting": name, "value": " | ".join(texts)}
        for name, texts in values.items()
        if [*texts] != ["None"]
    )
