"""An HTML file that loads nothing: its data as JSON, and the script and the style that show it.

What came from a model, a row or a server reaches the page as text only: page.js makes no HTML of it, and `without_script`,
for readers and previews that run none, escapes it. The page's policy allows that script alone, by its hash. A page is a list
of parts, each one of

    {"headline": text}, {"heading": text}, {"account": text}, {"note": text}
    {"progress": {"done": number, "total": number or null}}
    {"table": {"columns": [name], "rows": [[value]], "decimals": [bool]}, "fold": title, or without it open}
    {"histogram": ...}, {"shares": ...}, {"curve": ...}, {"rollout": ...}     as the functions here return them
    {"filters": {}}, {"task": {"environment": name, "name": text}}, rollouts  conversations, those of a task after it

A part with a `key` keeps it while its content changes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.files import replacing
from gymgate.results.tables import columns_of
from gymgate.rollouts import Outcome
from gymgate.rollouts.transcript import Entry, cut, entries_of, items_of, text_of
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.score import expected_answer, extracted_answer

LONGEST_TEXT = 6000
LONGEST_ANSWER = 200
BINS = 20
Part = Mapping[str, Any]
_TITLES = {
    "mean_reward": "mean reward",
    "mean_reward_se": "± se",
    "scored_tasks": "scored tasks",
    "max_k": "largest k",
    "no_answer": "no answer found",
    "std_reward": "sd of rewards",
    "model_server": "model server",
    "mean_calls": "calls",
    "mean_output_tokens": "output tokens",
    "mean_seconds": "seconds",
    "input_tokens": "input tokens",
    "cached_tokens": "cached tokens",
    "cached_share": "cached share",
    "output_tokens": "output tokens",
    "reasoning_tokens": "reasoning tokens",
    "left_out": "left out",
    "first": "A",
    "second": "B",
    "difference_se": "± se",
    "difference_ci95_low": "95% from",
    "difference_ci95_high": "to",
    "rows_needed": "rows for 80% power",
    "failed_needed": "failed that undo it",
    "rows_paired": "rows with pairs",
    "failed_first": "failed in A",
    "failed_second": "failed in B",
    "only_first": "rows only in A",
    "only_second": "rows only in B",
}
"""Heads of columns for readers of a page; files and `--json` have the names."""


def write_page(output: Path, title: str, parts: Iterable[Part]) -> None:
    """Write a page. Raises `DataError` if the file cannot be written."""
    with replacing(output) as file:
        file.write(page(title, parts))


def page(title: str, parts: Iterable[Part], *, events: str = "") -> bytes:
    """Return a page; at `events`, if that is given, is the stream of its server that tells it what changes."""
    style, script = (
        resources.files(__package__).joinpath(name).read_text() for name in ("page.css", "page.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    if events:
        allowed += "; connect-src 'self'"
    parts = [*parts]
    data = codec.dumps(parts).decode().replace("<", "\\u003c")
    text = (
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<noscript>{''.join(without_script(parts))}</noscript>"
        f"<main data-events='{html.escape(events)}'></main>"
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>\n'
    )
    return text.encode(errors="replace")


def without_script(parts: Iterable[Part]) -> Iterator[str]:
    """Yield the sentences, tables and conversations of a page as HTML; charts, filters and sorting need the script."""
    for part in parts:
        kind, value = next(iter(part.items()))
        if kind == "heading":
            yield _element("h2", value)
        elif kind in ("headline", "account", "note"):
            yield _element("p", value, kind)
        elif kind == "table" and value["rows"]:
            yield _static_table(value)
        elif kind == "task":
            yield _element("h3", value["name"])
            yield from _static_turns(value["prompt"])
        elif kind == "rollout":
            yield _element("h4", ", ".join([value["label"], *_verdict(value)]))
            yield from _static_turns(value["turns"])


def _element(name: str, text: Any, kind: str = "") -> str:
    """The only place where text becomes HTML."""
    return f"<{name} class='{kind}'>{html.escape(str(text))}</{name}>"


def _static_table(content: Mapping[str, Any]) -> str:
    head = "".join(_element("th", name) for name in content["columns"])
    rows = [
        "".join(_element("td", _shown(value, d)) for value, d in zip(row, content["decimals"], strict=True))
        for row in content["rows"]
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _static_turns(turns: Iterable[Sequence[str]]) -> Iterator[str]:
    for role, text in turns:
        yield _element("p", role, "role")
        yield _element("pre", text)


def _shown(value: Any, decimals: bool) -> str:
    """Return a value as page.js shows it."""
    if value is None:
        return "-"
    if not decimals or isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.3f}" if not value or 5e-4 <= abs(value) < 1e9 else f"{value:.4g}"


def _verdict(rollout: Mapping[str, Any]) -> Iterator[str]:
    """Yield outcome, reward and answers of a conversation."""
    yield rollout["outcome"]
    for name in ("reward", "expected", "extracted"):
        if rollout[name] is not None:
            yield f"{name} {rollout[name]}"


def keyed(parts: Iterable[Part]) -> Iterator[tuple[str, Part]]:
    """Yield parts with their keys: those that they have, else their heading, kind, title and number."""
    heading, numbers = "", Counter[str]()
    for part in parts:
        kind, value = next(iter(part.items()))
        heading = part.get("heading", heading)
        title = value.get("title", "") if isinstance(value, Mapping) else ""
        key = part.get("key") or f"{heading}/{kind}/{part.get('fold', title)}"
        numbers[key] += 1
        yield f"{key}/{numbers[key]}", part


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), fold: str | None = None) -> Part:
    """Rows as a table with `columns`, or all of them; folded under a title, or open."""
    names = columns or columns_of(rows)
    values = [[row.get(name) for name in names] for row in rows]
    decimals = [any(isinstance(row[place], float) for row in values) for place in range(len(names))]
    content = {"columns": [_TITLES.get(name, name) for name in names], "rows": values, "decimals": decimals}
    return {"table": content, **({"fold": fold} if fold else {})}


def histogram(title: str, values: Sequence[float]) -> Part:
    """How many values fall into each range; a bar for each whole number where there are only few of those."""
    low, high = min(values), max(values)
    whole = high - low <= BINS and all(value == int(value) for value in values)
    count = int(high - low) + 1 if whole else BINS if high > low else 1
    width = 1.0 if whole else (high - low) / count
    counts = [0] * count
    for value in values:
        # A value on an edge is in the range above it, however the division is rounded.
        place = int((value - low) / width + 1e-9) if width else 0
        counts[min(count - 1, place)] += 1
    step = 0.0 if whole else width
    bars = [[low + place * width, low + place * width + step, count] for place, count in enumerate(counts)]
    mean = math.fsum(values) / len(values)
    return {"histogram": {"title": title, "bars": bars, "count": len(values), "mean": mean}}


def shares(title: str, parts: Mapping[str, float], unit: str) -> Part:
    """One bar, split."""
    return {"shares": {"title": title, "unit": unit, "parts": [*parts.items()]}}


def curve(title: str, values: Iterable[Sequence[float]]) -> Part:
    """The mean of each list of values, from the lowest to the highest, with its range."""
    points = sorted((math.fsum(group) / len(group), min(group), max(group)) for group in values)
    return {"curve": {"title": title, "points": points}}


def conversation(attempt: Attempt, outcome: Outcome, label: str) -> Part:
    """A rollout with what was said and what was expected; it belongs to the task before it.

    Its prompt stands apart from its turns, for `task_parts`.
    """
    prompt, turns = (_turns(entries_of(items)) for items in items_of(attempt.result))
    if error := attempt.error:
        turns.append(["error", cut(f"{error.type}: {error.message}", LONGEST_TEXT)])
    numbers = {**(attempt.reward_parts or {}), **(attempt.metrics or {})}
    fields = {"label": label, "outcome": outcome.reason, "reward": outcome.reward, "numbers": numbers}
    answers = {
        "expected": shown_answer(expected_answer(attempt.result)),
        "extracted": shown_answer(extracted_answer(attempt.result, attempt.answer_found)),
    }
    return {"rollout": {**fields, **answers, "prompt": prompt, "turns": turns}}


def task_parts(environment: str, name: str, rollouts: Sequence[Part], key: str) -> Iterator[Part]:
    """Yield a task and its conversations; the prompt once, if all that have one have the same."""
    prompts = [prompt for part in rollouts if (prompt := part["rollout"]["prompt"])]
    shared = prompts[0] if all(prompt == prompts[0] for prompt in prompts) and prompts else []
    yield {"task": {"environment": environment, "name": name, "prompt": shared}, "key": key}
    for part in rollouts:
        content = {**part["rollout"]}
        prompt = content.pop("prompt")
        turns = content["turns"] if shared else [*prompt, *content["turns"]]
        yield {**part, "rollout": {**content, "turns": turns}}


def shown_answer(value: Any) -> str | None:
    """Return an answer as a short text."""
    return None if value is None else cut(text_of(value), LONGEST_ANSWER)


def _turns(entries: Iterable[Entry]) -> list[list[str]]:
    return [[entry.role, cut(entry.text, LONGEST_TEXT)] for entry in entries]
