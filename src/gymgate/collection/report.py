"""Runs as one HTML file that loads nothing: metrics, charts, failures, and conversations side by side.

Everything that came from a model, a row or a server is escaped. The page's policy allows one script, by its hash: the
one in report.js, which sorts tables and filters conversations.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import orjson

from gymgate.collection import charts
from gymgate.collection.aggregate import Runs, read_tasks
from gymgate.collection.metrics import notes_on_tasks, summary_rows, task_rows
from gymgate.collection.report_data import ReportData, gather
from gymgate.collection.tables import columns_of
from gymgate.collection.tasks import CollectedTasks
from gymgate.collection.transcript import Entry, transcript
from gymgate.files import replacing
from gymgate.rollout import outcome_of
from gymgate.rollout.outcome import Reason

LONGEST_TEXT = 6000
SHOWN_TASK_ROWS = 1000
SHOWN_NAMES = 5
FOLDED = ("reasoning", "output", "call ")
"""Beginnings of the roles whose entries are folded."""


def write_report(runs: Runs, output: Path, *, tasks: int = 50, per_task: int = 4) -> None:
    """Write one HTML file about runs, with up to `per_task` conversations of each of the first `tasks` tasks.

    Raises `ConfigError` for rollouts that are in two runs, and `DataError` if the file cannot be written.
    """
    collected = read_tasks(runs)
    data = gather(runs, tasks, per_task)
    with replacing(output) as file:
        file.writelines(part.encode() for part in _page(runs, collected, data))


def title_of(collected: CollectedTasks) -> str:
    """Model, environments and date, such as `m on mcqa, calendar, 2026-11-22`."""
    policy = collected.policy or {}
    model = policy.get("model") or policy.get("name") or "policy"
    who = "recorded answers" if collected.replayed else str(model) if policy else "rollouts"
    names = sorted({task.environment for task in collected.tasks.values()})
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    date = "" if collected.created is None else f", {datetime.fromtimestamp(collected.created, UTC):%Y-%m-%d}"
    return f"{who} on {', '.join(names[:SHOWN_NAMES])}{more}{date}"


def _page(runs: Runs, collected: CollectedTasks, data: ReportData) -> Iterator[str]:
    style, script = (
        resources.files(__package__).joinpath(name).read_text() for name in ("report.css", "report.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = _escaped(title_of(collected))
    yield "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
    yield f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
    yield "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    yield f"<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>"
    yield f"<p class='runs'>{_escaped(', '.join(map(str, runs.given)))}</p>"
    if collected.replayed:
        yield "<p class='note'>Recorded answers were replayed: the rewards say nothing about a model.</p>"
    for note in (*collected.notes, *notes_on_tasks(collected)):
        yield f"<p class='note'>{_escaped(note)}</p>"
    yield "<h2>Environments</h2>"
    yield from _table(summary_rows(collected))
    yield "<h2>Rollouts</h2>"
    yield charts.histogram("Reward", data.rewards)
    yield charts.histogram("Policy calls per rollout", data.calls)
    yield charts.histogram("Sampled tokens per rollout", data.tokens)
    yield charts.histogram("Seconds per rollout", data.seconds)
    yield charts.shares("Where the time goes", data.times, "s")
    measured = [rewards for task in collected.ordered() if (rewards := task.rewards())]
    means = [sum(rewards) / len(rewards) for rewards in measured]
    ranges = [(min(rewards), max(rewards)) for rewards in measured]
    yield charts.curve("Mean reward of each task, lowest first, with its range", means, ranges)
    if data.failures:
        yield "<h2>Failed attempts</h2>"
        yield from _table(
            [
                {
                    "class": kind,
                    "error": name,
                    "count": count,
                    "first message": _cut(data.messages[kind, name]),
                }
                for (kind, name), count in data.failures.most_common()
            ]
        )
    yield "<h2>Conversations</h2>"
    yield from _filters(sorted({environment for environment, _, _ in data.shown}))
    for name, shown in data.shown.items():
        yield from _task(name, shown)
    yield "<h2>Tasks</h2>"
    rows = [_without(row, "rewards", "source", "agent") for row in task_rows(collected)]
    if len(rows) > SHOWN_TASK_ROWS:
        yield f"<p class='note'>The first {SHOWN_TASK_ROWS} of {len(rows)}; gymgate aggregate -o writes all.</p>"
    yield from _table(rows[:SHOWN_TASK_ROWS])
    yield f"<script>{script}</script></body></html>\n"


def _filters(environments: Sequence[str]) -> Iterator[str]:
    yield "<form hidden>"
    yield from _select("environment", environments)
    yield from _select("outcome", get_args(Reason))
    for name in ("low", "high"):
        yield f"<label>reward {'from' if name == 'low' else 'to'} <input name='{name}' type='number' step='any'></label>"
    yield "<output></output></form>"


def _select(name: str, values: Sequence[str]) -> Iterator[str]:
    options = "".join(f"<option>{_escaped(value)}</option>" for value in values)
    yield f"<label>{name} <select name='{name}'><option value=''>all</option>{options}</select></label>"


def _task(name: tuple[str, str, int], shown: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    environment, row_key, _ = name
    rewards = ", ".join(_reward(rollout) for rollout in shown)
    yield f'<details class="task" data-environment="{_escaped(environment)}">'
    yield f"<summary>{_escaped(environment)} row {_escaped(row_key)}: rewards {_escaped(rewards)}</summary><div class='side'>"
    for rollout in shown:
        yield from _rollout(rollout)
    yield "</div></details>"


def _rollout(rollout: Mapping[str, Any]) -> Iterator[str]:
    outcome = outcome_of(rollout)
    tone = outcome.reason if outcome.reward is None else "good" if outcome.reward > 0 else "bad"
    reward = "" if outcome.reward is None else f"{outcome.reward:g}"
    seed = "" if rollout.get("seed") is None else f" seed {rollout['seed']}"
    yield f"<div class='rollout {tone}' data-outcome='{outcome.reason}' data-reward='{reward}'>"
    yield f"<b>repeat {_escaped(rollout.get('repeat'))}{_escaped(seed)}</b>"
    yield f" {_escaped(rollout.get('status'))}, reward {_escaped(_reward(rollout))}"
    parts = {**(rollout.get("reward_parts") or {}), **(rollout.get("metrics") or {})}
    if parts:
        yield f"<pre>{_escaped(orjson.dumps(parts).decode())}</pre>"
    for entry in transcript(rollout):
        yield _turn(entry)
    if error := rollout.get("error"):
        yield _turn(Entry("error", f"{error.get('type')}: {error.get('message')}"))
    yield "</div>"


def _turn(entry: Entry) -> str:
    role = entry.role.partition(" ")[0]
    kind = {"call": "tool", "output": "tool", "developer": "system"}.get(role, role)
    shown = kind if kind in ("system", "user", "assistant", "tool", "reasoning", "error") else "other"
    text = f"<pre>{_escaped(_cut(entry.text))}</pre>"
    if entry.role.startswith(FOLDED):
        size = f"{len(entry.text)} characters"
        text = f"<details><summary><span class='role'>{_escaped(entry.role)}</span> ({size})</summary>{text}</details>"
        return f"<div class='turn {shown}'>{text}</div>"
    return f"<div class='turn {shown}'><div class='role'>{_escaped(entry.role)}</div>{text}</div>"


def _reward(rollout: Mapping[str, Any]) -> str:
    """The reward that counts, or why there is none."""
    outcome = outcome_of(rollout)
    return outcome.reason if outcome.reward is None else _shown(outcome.reward)


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = columns_of(rows)
    kinds = {
        name: " class='text'" if any(isinstance(row.get(name), str) for row in rows) else "" for name in names
    }
    heads = "".join(f"<th{kinds[name]}>{_escaped(name)}</th>" for name in names)
    yield f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>"
    for row in rows:
        cells = "".join(f"<td{kinds[name]}>{_escaped(_shown(row.get(name)))}</td>" for name in names)
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    rest = len(text) - LONGEST_TEXT
    return text if rest <= 0 else f"{text[:LONGEST_TEXT]}\n... and {rest} more characters"


def _escaped(value: Any) -> str:
    """Escaped for HTML; a lone surrogate, which no file can hold, is replaced."""
    return html.escape(str(value).encode(errors="replace").decode())
