"""Runs as one HTML file that loads and runs nothing: figures, charts, failures, and conversations side by side.

Everything that came from a model, a row or a server is escaped, and the page forbids scripts altogether.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from gymgate.collection import charts
from gymgate.collection.aggregate import read_runs
from gymgate.collection.figures import summary_rows, task_rows
from gymgate.collection.report_material import Material, gather
from gymgate.collection.tasks import Collected
from gymgate.collection.transcript import transcript
from gymgate.rollout import outcome_of

LONGEST_TEXT = 6000
SHOWN_TASK_ROWS = 1000
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:1.5rem;color:#1b1b1b;background:#fff}
h1{font-size:1.4rem} h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;margin:.5rem 0} td,th{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left} figure{display:inline-block;margin:.4rem 1rem .4rem 0;vertical-align:top}
figcaption{font-weight:600} svg text{font-size:11px;fill:#444}
details{border:1px solid #ddd;border-radius:4px;margin:.3rem 0;padding:.3rem .6rem} summary{cursor:pointer}
.side{display:flex;gap:.8rem;overflow-x:auto;align-items:flex-start} .one{flex:0 0 26rem;border-top:4px solid #9c9c9c}
.one.good{border-color:#3ca951} .one.bad{border-color:#ff725c}
.who{font-weight:600;color:#555;margin-top:.5rem} pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.1rem 0;
background:#f6f6f6;padding:.4rem;border-radius:3px;max-height:24rem;overflow-y:auto}
.note{color:#8a5a00}
"""


def write_report(runs: Sequence[Path], output: Path, *, tasks: int = 50, per_task: int = 4) -> None:
    """One HTML file about runs: the first `tasks` tasks with up to `per_task` conversations each.

    Raises `DataError` and `ConfigError` as `read_runs` does, and `DataError` if the file cannot be written.
    """
    from gymgate.files import replacing

    collected = read_runs(runs, first_of_overlap=True)
    material = gather(runs, tasks, per_task)
    with replacing(output) as file:
        file.write("".join(_page(runs, collected, material)).encode())


def _page(runs: Sequence[Path], collected: Collected, material: Material) -> Iterator[str]:
    title = _e(", ".join(map(str, runs)))
    yield "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
    yield "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
    for note in collected.notes:
        yield f"<p class='note'>{_e(note)}</p>"
    yield "<h2>Environments</h2>"
    yield from _table(summary_rows(collected))
    yield "<h2>Rollouts</h2>"
    yield charts.histogram("Reward", material.rewards)
    yield charts.histogram("Policy calls per rollout", material.calls)
    yield charts.histogram("Sampled tokens per rollout", material.tokens)
    yield charts.histogram("Seconds per rollout", material.seconds)
    yield charts.shares("Where the time goes", material.split, "s")
    measured = [task.rewards() for task in collected.ordered() if task.rewards()]
    means = [sum(rewards) / len(rewards) for rewards in measured]
    bands = [(min(rewards), max(rewards)) for rewards in measured]
    yield charts.curve("Mean reward of each task, lowest first, with its range", means, bands)
    yield from _failures(material)
    yield "<h2>Conversations</h2>"
    for name, shown in material.shown.items():
        yield from _task(name, shown)
    yield "<h2>Tasks</h2>"
    rows = [_without(row, "rewards", "source", "agent") for row in task_rows(collected)]
    if len(rows) > SHOWN_TASK_ROWS:
        yield f"<p class='note'>The first {SHOWN_TASK_ROWS} of {len(rows)}; gymgate aggregate -o writes all.</p>"
    yield from _table(rows[:SHOWN_TASK_ROWS])
    yield "</body></html>\n"


def _failures(material: Material) -> Iterator[str]:
    if not material.failures:
        return
    yield "<h2>Failed attempts</h2><table><tr><th>class</th><th>error</th><th>count</th><th>first message</th></tr>"
    for (kind, name), count in material.failures.most_common():
        message = _e(_cut(material.examples[kind, name]))
        yield f"<tr><td>{_e(kind)}</td><td>{_e(name)}</td><td>{count}</td><td>{message}</td></tr>"
    yield "</table>"


def _task(name: tuple[str, str, int], shown: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    environment, row_key, _ = name
    rewards = ", ".join(_reward(rollout) for rollout in shown)
    yield f"<details><summary>{_e(environment)} row {_e(row_key)}: rewards {_e(rewards)}</summary><div class='side'>"
    for rollout in shown:
        reward = outcome_of(rollout).reward
        tone = "" if reward is None else " good" if reward > 0 else " bad"
        seed = "" if rollout.get("seed") is None else f" seed {rollout['seed']}"
        yield f"<div class='one{tone}'><b>repeat {_e(rollout.get('repeat'))}{_e(seed)}</b>"
        yield f" {_e(rollout.get('status'))}, reward {_e(_reward(rollout))}"
        parts = {**(rollout.get("reward_parts") or {}), **(rollout.get("metrics") or {})}
        if parts:
            yield f"<pre>{_e(orjson.dumps(parts).decode())}</pre>"
        for who, text in transcript(rollout):
            yield f"<div class='who'>{_e(who)}</div><pre>{_e(_cut(text))}</pre>"
        yield "</div>"
    yield "</div></details>"


def _reward(rollout: Mapping[str, Any]) -> str:
    """The reward that counts, or why there is none."""
    result = outcome_of(rollout)
    return result.reason if result.reward is None else _figure(result.reward)


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from gymgate.collection.tables import columns_of

    names = columns_of(rows)
    yield f"<table><tr>{''.join(f'<th>{_e(name)}</th>' for name in names)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{_e(_figure(row.get(name)))}</td>' for name in names)}</tr>"
    yield "</table>"


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    rest = len(text) - LONGEST_TEXT
    return text if rest <= 0 else f"{text[:LONGEST_TEXT]}\n... and {rest} more characters"


def _e(value: Any) -> str:
    """Escaped; a lone surrogate, which no file can hold, is replaced."""
    return html.escape(str(value).encode(errors="replace").decode())
