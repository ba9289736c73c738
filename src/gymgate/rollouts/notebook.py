"""HTML for notebooks, of bounded size and without script: tables, and a rollout with its folded conversation."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gymgate.core.codec import clean_text
from gymgate.rollouts.transcript import Entry, cut

LONGEST_TEXT = 2000
"""Characters of a text that are shown."""
MOST_ENTRIES = 40
"""Entries of a conversation that are shown: the first half and the last half of them."""


def conversation_html(heading: Mapping[str, str], error: str | None, entries: list[Entry]) -> str:
    """Return a conversation below a table of one row and an error. All texts are escaped and cut."""
    parts = [html_table([*heading], [[*heading.values()]])]
    if error is not None:
        parts.append(f"<p>{html_text(error)}</p>")
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


def _entries(entries: list[Entry]) -> Iterator[str]:
    half = MOST_ENTRIES // 2
    left_out = len(entries) - 2 * half
    excerpt = entries if left_out <= 0 else [*entries[:half], *entries[-half:]]
    for number, entry in enumerate(excerpt):
        if number == half and left_out > 0:
            yield f"<p>{left_out} entries are left out</p>"
        role = html_text(f"{cut(entry.role, 100)} ({len(entry.text)} characters)")
        yield f"<details><summary>{role}</summary><pre>{html_text(entry.text)}</pre></details>"
