"""`gymgate cache`: list what is in the cache, and remove what is not used."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymgate.cli.options import json_option
from gymgate.cli.output import echo, log, print_json, print_table, size_text

if TYPE_CHECKING:
    from gymgate.gym.runtime.cache import CacheEntry


@dataclass(frozen=True)
class CacheRecord:
    """An entry of the cache."""

    kind: str
    path: Path
    detail: str
    """Its content, on one line."""
    requirements: Sequence[str]
    """Requirements that a runtime has in addition to nemo-gym."""
    bytes: int
    """Size on disk."""
    last_used: float
    """Seconds since 1970."""
    in_use: bool
    processes: Sequence[int]
    """Processes that use it, as far as they can be known."""


@dataclass(frozen=True)
class CacheListing:
    """What `gymgate cache --json` prints."""

    path: Path
    entries: Sequence[CacheRecord]


@dataclass(frozen=True)
class RemovalRecord:
    """An entry of the cache that `gymgate cache clean --json` lists: removed, or due and kept."""

    kind: str
    path: Path
    removed: bool
    bytes: int
    why: str | None
    """Why it was kept."""


_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Convert a duration such as `30d` to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", value.strip())
    if match is None:
        raise click.BadParameter(
            f"{value!r} is not a duration; write a number and a unit, as in 90m, 12h, 30d, 2w."
        )
    return float(match[1]) * _UNITS[match[2]]


@click.group("cache", invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the cache; `gymgate cache clean` frees space.

    For each runtime, command and download: its content, its size on disk (its files may also be in uv's cache or in
    another runtime), when it was last used, and the processes that use it now.
    """
    if context.invoked_subcommand is not None:
        return
    from gymgate.core.config import cache_dir
    from gymgate.gym.runtime.cache import cache_entries, measure

    entries = cache_entries()
    if as_json:
        print_json(CacheListing(cache_dir(), [_description(entry) for entry in entries]))
        return
    if not entries:
        echo(f"nothing in {cache_dir()}")
        return
    print_table(("what", "name", "holds", "size", "last used"), map(_row, entries), fixed=2)
    echo(f"{size_text(measure(cache_dir()))} in {cache_dir()}")


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
@click.option("--dry-run", is_flag=True, help="Show what would be removed without removing it.")
@json_option
def clean_command(unused_for: float, everything: bool, dry_run: bool, as_json: bool) -> None:
    """Remove what was not used for a while.

    That is runtimes, commands, downloads and indexes, and Docker containers of stacks that are gone. What a running stack or
    another process uses stays. gymgate later rebuilds or downloads what it needs. uv has its own cache: `uv cache prune`.
    """
    from gymgate.core.config import cache_dir
    from gymgate.gym.runtime.cache import clean, measure
    from gymgate.gym.runtime.containers import describe_unjudged, leftovers, remove_leftovers

    containers_left = leftovers()
    containers = [container for container in containers_left if container.is_certain]
    if not dry_run:
        remove_leftovers(containers)
    before = 0 if dry_run or as_json else measure(cache_dir())
    removals = list(clean(None if everything else unused_for, dry_run=dry_run, progress=log))
    if as_json:
        print_json(
            [
                RemovalRecord(entry.kind, entry.path, not reason, size, reason or None)
                for entry, size, reason in removals
            ]
        )
        return
    done = "would remove" if dry_run else "removed"
    for container in containers:
        echo(f"{done} container {container.id} of a stack that is gone ({container.image})")
    if unjudged := describe_unjudged(containers_left):
        echo(f"kept {unjudged}")
    for entry, size, reason in removals:
        echo(f"{'kept' if reason else done} {entry.kind} {_name(entry)}: {reason or size_text(size)}")
    if dry_run:  # runtimes share files
        due = measure(*(entry.path for entry, _, reason in removals if not reason))
        echo(f"{done} at most {size_text(due)}")
    else:
        echo(f"{done} {size_text(max(0, before - measure(cache_dir())))}")


def _row(entry: CacheEntry) -> tuple[str, ...]:
    from gymgate.gym.runtime.cache import measure

    users, used = entry.users(), age_text(time.time() - entry.last_used)
    if users is not None:
        used = f"in use by {', '.join(map(str, users))}" if users else "in use"
    holds = ", ".join([entry.detail, *entry.packages])
    return entry.kind, _name(entry), holds, size_text(measure(entry.path)), used


def _name(entry: CacheEntry) -> str:
    name = entry.path.name
    return name if entry.path.parent.name not in ("npm", "data") else f"{entry.path.parent.name}/{name}"


def _description(entry: CacheEntry) -> CacheRecord:
    from gymgate.gym.runtime.cache import measure

    users = entry.users()
    return CacheRecord(
        kind=entry.kind,
        path=entry.path,
        detail=entry.detail,
        requirements=entry.requirements,
        bytes=measure(entry.path),
        last_used=entry.last_used,
        in_use=users is not None,
        processes=users or [],
    )


def age_text(seconds: float) -> str:
    """Return an age such as `3 h ago`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
