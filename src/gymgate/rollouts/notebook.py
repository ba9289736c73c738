"""HTML for notebooks, of bounded size and without script: tables, and a rollout with its folded conversation."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from gymgate.core.codec import clean_text
from gymgate.rollouts.outcome import outcome_of
from gymgate.rollouts.record import Rollout
from gymgate.rollouts.transcript import Entry, cut, transcript

LONGEST_TEXT = 2000
"""Characters of a text that are shown."""
MOST_ENTRIES = 40
"""Entries of a conversation that are shown: the first half and the last half of them."""


def rollout_html(rollout: Rollout) -> str:
    """Return HTML in which every text is escaped; what is too long is cut, and says so."""
    cells = {"environment": rollout.environment, "agent": rollout.agent, **_figures(rollout)}
    parts = [html_table([*cells], [[*cells.values()]])]
    if (error := rollout.error) is not None:
        parts.append(f"<p>{html_text(f'{error.type}: {error.message}')}</p>")
    entries = transcript(rollout.result)
    if entries:
        said = "".join(_entries(entries))
        parts.append(f"<details><summary>Conversation, {len(entries)} entries</summary>{said}</details>")
    return f"<div>{''.join(parts)}</div>"


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts, which are escaped and cut."""
    head = "".join(f"<th>{html_text(name)}</th>" for name in columns)
    lines = ("".join(f"<td>{html_text(value)}</td>" for value in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_text(text: str) -> str:
    """Return a text without markup; what is too long is cut, and says so."""
    return html.escape(clean_text(cut(text, LONGEST_TEXT)))


def rollout_line(rollout: Rollout) -> str:
    """Return one short line, which stands for a rollout in lists."""
    figures = ", ".join(f"{name} {value}" for name, value in _figures(rollout).items())
    error = "" if rollout.error is None else f", {rollout.error.type}"
    return f"<{type(rollout).__name__} {rollout.environment[:100]}: {figures}{error}>"


def _figures(rollout: Rollout) -> dict[str, str]:
    reward = outcome_of(rollout).reward
    limit = "" if rollout.limit is None else f" ({rollout.limit})"
    return {
        "status": f"{rollout.status}{limit}",
        "reward": "none" if reward is None else f"{reward:.4g}",
        "calls": str(len(rollout.policy_calls)),
        "seconds": f"{rollout.timing.total_s:.1f}",
    }


def _entries(entries: list[Entry]) -> Iterator[str]:
    half = MOST_ENTRIES // 2
    left_out = len(entries) - 2 * half
    shown = entries if left_out <= 0 else [*entries[:half], *entries[-half:]]
    for number, entry in enumerate(shown):
        if number == half and left_out > 0:
            yield f"<p>{left_out} entries are left out</p>"
        role = html_text(f"{cut(entry.role, 100)} ({len(entry.text)} characters)")
        yield f"<details><summary>{role}</summary><pre>{html_text(entry.text)}</pre></details>"
