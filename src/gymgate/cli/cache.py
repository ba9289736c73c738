"""`gymgate cache`: what lies in the cache, and its removal."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gymgate.runtime.cache import Outcome, Part

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """`30d`, as seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", value.strip())
    if found is None:
        raise click.BadParameter(f"{value!r} is no duration: a number and a unit, as in 90m, 12h, 30d or 2w.")
    return float(found[1]) * _UNITS[found[2]]


@click.group("cache", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List runtimes, commands and downloads in the cache; `gymgate cache clean` removes what is not used.

    Each with what it holds, its size on disk, what removing it alone frees (files may lie in uv's cache, or in another
    runtime, too), when it was last used, and the processes that use it now.
    """
    if context.invoked_subcommand is not None:
        return
    from gymgate.config import cache_dir
    from gymgate.runtime.cache import measure, parts

    found = parts()
    if as_json:
        import orjson

        report = {"path": str(cache_dir()), "parts": [_description(part) for part in found]}
        click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
        return
    if not found:
        click.echo(f"nothing in {cache_dir()}")
        return
    from gymgate.cli.output import print_table

    print_table(("what", "name", "holds", "size", "frees", "last used"), _rows(found), fixed=2)
    total = measure(*(part.path for part in found))
    click.echo(f"{size_text(total.total)} in {cache_dir()}")
    if total.alone < total.total:
        click.echo(f"{size_text(total.total - total.alone)} of it are files that uv's cache has, too")


@command.command("clean")
@click.option(
    "--unused-for",
    callback=seconds,
    default="30d",
    show_default=True,
    metavar="TIME",
    help="Remove what was not used for so long: 90m, 12h, 30d, 2w.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Remove everything that no process uses now, however lately it was used.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def clean_command(unused_for: float, everything: bool, dry_run: bool, as_json: bool) -> None:
    """Remove runtimes, commands, downloads and indexes that were not used for a while.

    What a running stack or another process uses always stays. What is removed is made, or fetched, again when it is
    needed. uv has a cache of its own: `uv cache prune`.
    """
    from gymgate.runtime.cache import clean

    outcomes = []
    for outcome in clean(None if everything else unused_for, dry_run=dry_run, say=_tell):
        outcomes.append(outcome)
        if not as_json and (line := _line(outcome, dry_run)):
            click.echo(line)
    if as_json:
        import orjson

        click.echo(orjson.dumps([_told(outcome) for outcome in outcomes], option=orjson.OPT_INDENT_2))
        return
    freed = sum(outcome.freed for outcome in outcomes)
    stay = sum(not outcome.removed and outcome.part.kind != "other" for outcome in outcomes)
    verb = "would free" if dry_run else "freed"
    click.echo(
        f"{verb} {size_text(freed)}; {stay} part{'' if stay == 1 else 's'} stay{'s' if stay == 1 else ''}"
    )


def _line(outcome: Outcome, dry_run: bool) -> str | None:
    """What is said of a part; nothing of those that were used lately, or are never removed."""
    part = outcome.part
    if outcome.removed:
        return f"{'would remove' if dry_run else 'removed'} {part.kind} {_name(part)} ({size_text(outcome.freed)})"
    return f"kept {part.kind} {_name(part)}: {outcome.why}" if outcome.in_the_way else None


def _rows(found: Iterable[Part]) -> Iterator[tuple[str, ...]]:
    """A line a part; the many small ones of a directory share one."""
    from gymgate.runtime.cache import measure

    gathered: dict[str, list[Part]] = {}
    for part in found:
        gathered.setdefault(part.path.parent.name if part.kind == "index" else str(part.path), []).append(
            part
        )
    for alike in gathered.values():
        part, users = alike[0], alike[0].users()
        used = age_text(time.time() - max(each.last_used for each in alike))
        if users is not None:
            used = f"in use by {', '.join(map(str, users))}" if users else "in use"
        name = _name(part) if len(alike) == 1 else f"{part.path.parent.name} ({len(alike)} files)"
        holds = ", ".join([part.detail, *part.packages])
        size = measure(*(each.path for each in alike))
        yield part.kind, name, holds, size_text(size.total), size_text(size.alone), used


def _name(part: Part) -> str:
    return (
        part.path.name if part.kind in ("runtime", "other") else f"{part.path.parent.name}/{part.path.name}"
    )


def _description(part: Part) -> dict[str, Any]:
    from gymgate.runtime.cache import measure

    size, users = measure(part.path), part.users()
    return {
        "kind": part.kind,
        "path": str(part.path),
        "detail": part.detail,
        "requirements": list(part.requirements),
        "bytes": size.total,
        "bytes_alone": size.alone,
        "last_used": part.last_used,
        "in_use": users is not None,
        "processes": users or [],
    }


def _told(outcome: Outcome) -> dict[str, Any]:
    part = outcome.part
    told = {"kind": part.kind, "path": str(part.path), "removed": outcome.removed, "freed": outcome.freed}
    return {**told, "why": outcome.why or None}


def _tell(line: str) -> None:
    click.echo(line, err=True)


def size_text(size: float) -> str:
    """`1.2 GB`"""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def age_text(seconds: float) -> str:
    """`3 h ago`"""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
