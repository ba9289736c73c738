"""The table of figures that people publish, aligned for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
COUNTS = ("tasks", "rollouts", "failed")
RUNS = "±runs"
"""Standard error of pass@1 over runs (seeds and repeats), beside the one over tasks."""


def cells(rows: Rows) -> list[list[str]]:
    """A header and a line per environment: counts, pass@k and maj@k with their standard errors."""
    names = [*_numbered("pass@", rows), *(name for name in _numbered("maj@", rows) if name != "maj@1")]
    titles = [title for name in names for title in ([name, RUNS] if name == "pass@1" else [name])]
    lines = [["environment", *COUNTS, *titles]]
    for row in rows:
        figures = [
            cell
            for name in names
            for cell in ([_figure(row, name), _runs(row)] if name == "pass@1" else [_figure(row, name)])
        ]
        lines.append([str(row["environment"]), *(str(row[name]) for name in COUNTS), *figures])
    return lines


def as_text(rows: Rows) -> list[str]:
    """Lines with aligned columns."""
    lines = cells(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            [
                first.ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)),
            ]
        )
        for first, *rest in lines
    ]


def as_markdown(rows: Rows) -> list[str]:
    """Lines of a Markdown table."""
    header, *lines = cells(rows)
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in (header, rule, *lines)]


def _numbered(prefix: str, rows: Rows) -> list[str]:
    found = {
        name for row in rows for name in row if name.startswith(prefix) and name[len(prefix) :].isdigit()
    }
    return sorted(found, key=lambda name: int(name[len(prefix) :]))


def _figure(row: Mapping[str, Any], name: str) -> str:
    value, error = row.get(name), row.get(f"{name}_se")
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ±{error:.4f}"


def _runs(row: Mapping[str, Any]) -> str:
    error = row.get("pass@1_se_runs")
    return "-" if error is None else f"±{error:.4f}"


def _escaped(cell: str) -> str:
    return cell.replace("|", r"\|")
