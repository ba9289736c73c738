"""`gymgate cache`: list what is in the cache, and remove what is not used."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from gymgate.cli.options import json_option
from gymgate.cli.output import log, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gymgate.runtime.cache import CacheEntry

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Convert a duration such as `30d` to seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", value.strip())
    if found is None:
        raise click.BadParameter(
            f"{value!r} is not a duration; write a number and a unit, as in 90m, 12h, 30d, 2w."
        )
    return float(found[1]) * _UNITS[found[2]]


@click.group("cache", invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the cache; `gymgate cache clean` frees space.

    For each runtime, command and download: its content, its size on disk, the space that its removal frees (its files
    may also be in uv's cache or in another runtime), when it was last used, and the processes that use it now.
    """
    if context.invoked_subcommand is not None:
        return
    from gymgate.config import cache_dir
    from gymgate.runtime.cache import cache_entries, measure

    found = cache_entries()
    if as_json:
        print_json({"path": str(cache_dir()), "parts": [_description(entry) for entry in found]})
        return
    if not found:
        click.echo(f"nothing in {cache_dir()}")
        return
    print_table(("what", "name", "holds", "size", "frees", "last used"), _rows(found), fixed=2)
    total = measure(*(entry.path for entry in found))
    click.echo(f"{size_text(total.total)} in {cache_dir()}")
    if total.alone < total.total:
        click.echo(f"{size_text(total.total - total.alone)} of it are files that are also in uv's cache")


@command.command("clean")
@click.option(
    "--unused-for",
    callback=seconds,
    default="30d",
    show_default=True,
    metavar="TIME",
    help="Remove what was not used for this long: 90m, 12h, 30d, 2w.",
)
@click.option("--all", "everything", is_flag=True, help="Remove everything that no process uses now.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@json_option
def clean_command(unused_for: float, everything: bool, dry_run: bool, as_json: bool) -> None:
    """Remove runtimes, commands, downloads and indexes that were not used for a while.

    Also removes Docker containers of stacks that are gone. Whatever a running stack or another process uses stays. gymgate
    makes or downloads again what it needs later. uv has its own cache: `uv cache prune`.
    """
    from gymgate.runtime.cache import clean
    from gymgate.runtime.containers import describe_unjudged, leftovers, remove

    found = leftovers()
    containers = [container for container in found if container.is_certain]
    if not dry_run:
        remove(containers)
    for container in () if as_json else containers:
        click.echo(
            f"{'would remove' if dry_run else 'removed'} container {container.id} of a stack that is gone ({container.image})"
        )
    if (unjudged := describe_unjudged(found)) and not as_json:
        click.echo(f"kept {unjudged}")
    removals = []
    for removal in clean(None if everything else unused_for, dry_run=dry_run, progress=log):
        removals.append(removal)
        if as_json or not (removal.removed or removal.in_the_way):
            continue
        entry = f"{removal.entry.kind} {_name(removal.entry)}"
        if removal.removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {entry} ({size_text(removal.freed)})")
        else:
            click.echo(f"kept {entry}: {removal.why}")
    if as_json:
        print_json(
            [
                {
                    "kind": removal.entry.kind,
                    "path": str(removal.entry.path),
                    "removed": removal.removed,
                    "freed": removal.freed,
                    "why": removal.why or None,
                }
                for removal in removals
            ]
        )
        return
    freed = sum(removal.freed for removal in removals)
    stay = sum(not removal.removed and removal.entry.kind != "other" for removal in removals)
    parts = "1 part stays" if stay == 1 else f"{stay} parts stay"
    click.echo(f"{'would free' if dry_run else 'freed'} {size_text(freed)}; {parts}")


def _rows(found: Iterable[CacheEntry]) -> Iterator[tuple[str, ...]]:
    """A row for each entry; the many small indexes in one directory share a row."""
    from gymgate.runtime.cache import measure

    groups: dict[str, list[CacheEntry]] = {}
    for entry in found:
        key = entry.path.parent if entry.kind == "index" else entry.path
        groups.setdefault(str(key), []).append(entry)
    for group in groups.values():
        entry, users = group[0], group[0].users()
        used = age_text(time.time() - max(each.last_used for each in group))
        if users is not None:
            used = f"in use by {', '.join(map(str, users))}" if users else "in use"
        name = _name(entry) if len(group) == 1 else f"{entry.path.parent.name} ({len(group)} files)"
        size = measure(*(each.path for each in group))
        holds = ", ".join([entry.detail, *entry.packages])
        yield entry.kind, name, holds, size_text(size.total), size_text(size.alone), used


def _name(entry: CacheEntry) -> str:
    name = entry.path.name
    return name if entry.kind in ("runtime", "other") else f"{entry.path.parent.name}/{name}"


def _description(entry: CacheEntry) -> dict[str, object]:
    from gymgate.runtime.cache import measure

    size, users = measure(entry.path), entry.users()
    return {
        "kind": entry.kind,
        "path": str(entry.path),
        "detail": entry.detail,
        "requirements": list(entry.requirements),
        "bytes": size.total,
        "bytes_alone": size.alone,
        "last_used": entry.last_used,
        "in_use": users is not None,
        "processes": users or [],
    }


def size_text(size: float) -> str:
    """Return a size such as `1.2 GB`."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def age_text(seconds: float) -> str:
    """Return an age such as `3 h ago`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
