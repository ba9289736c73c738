"""What commands print: results on stdout, messages on stderr, tables that fit a terminal and stay greppable in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

Log = Callable[[str], None]
"""Takes a message for the user: `log` here, or one that prints beside a progress bar."""
_WIDE = 100_000
"""Columns assumed of a pipe, so that nothing is cut or wrapped there."""


def log(message: str) -> None:
    """Print a message to stderr."""
    click.echo(message, err=True)


def print_json(value: Any, *, indent: bool = True) -> None:
    """Print a value as one JSON document to stdout; dataclasses become objects."""
    import orjson

    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, fixed: int = 1) -> None:
    """Print a table to stdout; the first `fixed` columns are never wrapped. In a pipe: one line per row, no frame."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, header_style="bold")
    for number, title in enumerate(header):
        table.add_column(title, no_wrap=number < fixed or not console.is_terminal, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
