"""What commands print: results on stdout, messages on stderr, tables that fit a terminal and stay greppable in a pipe."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from gymgate.core.errors import printable, printable_json

Log = Callable[[str], None]
"""Takes a message for the user: `log` here, or one that prints beside a progress bar."""
GAP = "  "
"""Between two columns."""
_WIDE = 100_000
"""Columns assumed of a pipe, so that nothing is cut or wrapped there."""


def log(message: str) -> None:
    """Print a message to stderr."""
    echo(explained(message), err=True)


def explained(message: str) -> str:
    """Return a message, with where the options that it names are explained if the running command's `--help` has not all."""
    context = click.get_current_context(silent=True)
    where = getattr(context.command, "where_explained", None) if context else None
    return f"{message}{where(message, context.command_path)}" if context and where else message


def log_next(*steps: str) -> None:
    """Print the last line of a command that made or read results: what to do next, without the steps that are empty."""
    log(f"next: {'  |  '.join(filter(None, steps))}")


def echo(text: str = "", *, err: bool = False) -> None:
    """Print text that may hold words from outside: of a model, an endpoint, an environment or a file."""
    click.echo(printable(text), err=err)


def print_json(value: Any) -> None:
    """Print a value as one JSON document to stdout; dataclasses and models become objects, paths become texts."""
    from pydantic_core import to_json

    click.echo(printable_json(to_json(value, indent=2, inf_nan_mode="null").decode()))


def size_text(size: float) -> str:
    """Return a size such as `1.2 GB`."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


SHORT = 12
"""Characters of a cell that is never wrapped: numbers and single words."""
NAME = 28
"""Characters of a name that stay while there are columns to drop."""


@dataclass(frozen=True)
class Column:
    """A column of `print_columns`."""

    title: str
    cells: Sequence[str]
    left: bool = False
    """Aligned at the left, as text is; numbers are aligned at the right."""
    rank: int = 0
    """Where the terminal is too narrow, columns are left out: the highest ranks first, the last one of a rank first; never 0."""

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, fixed: int = 1) -> None:
    """Print a table to stdout; the first `fixed` columns and short cells are never wrapped. In a pipe: a line per row."""
    lines = [*rows]
    columns = [Column(title, [line[number] for line in lines]) for number, title in enumerate(header)]
    wrapped = {column.title for column in columns[fixed:] if max(map(len, column.cells), default=0) > SHORT}
    _print([dataclasses.replace(column, left=True) for column in columns], wrapped)


def print_columns(columns: Sequence[Column], *, drop: bool = True) -> None:
    """Print a table to stdout in which only the first column, the names, is ever cut.

    On a terminal that is too narrow, columns with a rank are dropped, which a message says; without `drop` the columns go on
    in further tables, each with the names.
    """
    room = _room()
    names, *others = columns
    if drop:
        dropped: list[str] = []
        while _width([names, *others], NAME) > room and (
            rank := max((column.rank for column in others), default=0)
        ):
            last = [column for column in others if column.rank == rank][-1]
            others.remove(last)
            dropped.insert(0, last.title)
        _print([_cut(names, room - _width([names, *others], 0)), *others])
        if dropped:
            log(f"too narrow for {', '.join(dropped)}: --wide shows every column")
        return
    while others:
        count = 1
        while count < len(others) and _width([names, *others[: count + 1]], NAME) <= room:
            count += 1
        _print([_cut(names, room - _width([names, *others[:count]], 0)), *others[:count]])
        others = others[count:]


def _room() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE


def _width(columns: Sequence[Column], most: int) -> int:
    """Return the width of a table whose first column has at most `most` characters."""
    names, *others = columns
    return min(names.width, most) + sum(column.width + len(GAP) for column in others)


def _cut(names: Column, room: int) -> Column:
    """Cut names that are too long; their title stays whole while it fits."""
    room = max(room, 2)
    cells = [cell if len(cell) <= room else f"{cell[: room - 1]}…" for cell in names.cells]
    return dataclasses.replace(names, title=names.title[:room], cells=cells)


def _print(columns: Sequence[Column], wrapped: Container[str] = ()) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(width=_room(), height=50)  # of a dumb terminal rich would take 80 columns
    table = Table(
        box=SIMPLE_HEAD if terminal else None,
        show_edge=False,
        pad_edge=False,
        padding=(0, len(GAP) - 1 if terminal else len(GAP), 0, 0),
        header_style="bold",
    )
    for column in columns:
        table.add_column(
            column.title,
            no_wrap=not (terminal and column.title in wrapped),
            overflow="fold",
            justify="left" if column.left else "right",
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(printable(cell).replace("\n", " ")) for cell in cells))
    if terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
