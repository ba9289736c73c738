"""An HTML file that loads nothing: its data as JSON, and the script and the style that show it.

What came from a model, a row or a server reaches the page as text only: page.js makes no HTML of it. The page's policy
allows that script alone, by its hash. A page is a list of parts, each one of

    {"heading": text}, {"note": text}, {"progress": {"done": number, "total": number or null}}
    {"table": {"columns": [name], "rows": [[value]]}, "fold": title, or without it open}
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
from gymgate.rollouts.transcript import cut, transcript
from gymgate.runs.attempts import Attempt

LONGEST_TEXT = 6000
BINS = 20
Part = Mapping[str, Any]


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
    data = codec.dumps([*parts]).decode().replace("<", "\\u003c")
    text = (
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body><h1>{html.escape(title)}</h1>"
        "<noscript>This page needs JavaScript; its data is in the file.</noscript>"
        f"<main data-events='{html.escape(events)}'></main>"
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>\n'
    )
    return text.encode(errors="replace")


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
    return {"table": {"columns": [*names], "rows": values}, **({"fold": fold} if fold else {})}


def histogram(title: str, values: Sequence[float]) -> Part:
    """How many values fall into each range; a bar for each whole number where there are only few of those."""
    if not values:
        return {"histogram": {"title": title, "bars": []}}
    low, high = min(values), max(values)
    whole = high - low <= BINS and all(value == int(value) for value in values)
    count = int(high - low) + 1 if whole else BINS if high > low else 1
    width = 1.0 if whole else (high - low) / count
    counts = [0] * count
    for value in values:
        counts[min(count - 1, int((value - low) / width)) if width else 0] += 1
    step = 0.0 if whole else width
    bars = [[low + place * width, low + place * width + step, count] for place, count in enumerate(counts)]
    mean = math.fsum(values) / len(values)
    return {"histogram": {"title": title, "bars": bars, "count": len(values), "mean": mean}}


def shares(title: str, parts: Mapping[str, float], unit: str) -> Part:
    """One bar, split."""
    return {"shares": {"title": title, "unit": unit, "parts": [*parts.items()]}}


def curve(title: str, values: Iterable[Sequence[float]]) -> Part:
    """The mean of each list of values, from the lowest to the highest, with its range."""
    points = sorted((math.fsum(each) / len(each), min(each), max(each)) for each in values)
    return {"curve": {"title": title, "points": points}}


def conversation(attempt: Attempt, label: str) -> Part:
    """A rollout with what was said; it belongs to the task before it."""
    turns = [[entry.role, cut(entry.text, LONGEST_TEXT)] for entry in transcript(attempt.result)]
    if error := attempt.error:
        turns.append(["error", cut(f"{error.type}: {error.message}", LONGEST_TEXT)])
    outcome, numbers = attempt.outcome, {**(attempt.reward_parts or {}), **(attempt.metrics or {})}
    shown = {"label": label, "outcome": outcome.reason, "reward": outcome.reward, "numbers": numbers}
    return {"rollout": {**shown, "turns": turns}}
