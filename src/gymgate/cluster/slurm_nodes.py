"""The nodes of a Slurm job, from the variables that Slurm sets in it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping

from gymgate.core.errors import ConfigError

_ENTRY = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[(.*?)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
LARGEST = 100_000
"""Nodes of one list; a longer list is a mistake."""


def job_nodes(environment: Mapping[str, str] = os.environ, group: int | None = None) -> list[str]:
    """Return the hostnames of this process's job, or of one group of a heterogeneous job.

    Raises `ConfigError` outside of a job, and for a list that cannot be read.
    """
    suffix = "" if group is None else f"_HET_GROUP_{group}"
    names = (f"SLURM_JOB_NODELIST{suffix}", f"SLURM_NODELIST{suffix}")
    for name in names:
        if text := environment.get(name):
            return expand(text)
    raise ConfigError(f"not in a Slurm job: {names[0]} is not set; give the servers' addresses instead")


def expand(text: str) -> list[str]:
    """Expand `node[01-03,7],login` to `node01 node02 node03 node7 login`. Raises `ConfigError`."""
    entries = _ENTRY.findall(text)
    if not entries or ",".join(entries) != text:
        raise ConfigError(f"Slurm node list {text!r} cannot be read; it must look like node[01-03,7],login")
    names = itertools.chain.from_iterable(_expand_entry(entry, text) for entry in entries)
    nodes = list(itertools.islice(names, LARGEST + 1))
    if len(nodes) > LARGEST:
        raise ConfigError(f"Slurm node list {text!r} has more than {LARGEST:,} nodes")
    return nodes


def _expand_entry(entry: str, whole: str) -> Iterator[str]:
    pieces = _BRACKETS.split(entry)  # text and the content of brackets in turn
    choices = [_numbers(piece, whole) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _numbers(text: str, whole: str) -> Iterator[str]:
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + LARGEST:
            raise ConfigError(f"Slurm node list {whole!r}: {part!r} is not a number or range, e.g. 01-03")
        for number in range(first, last + 1):
            yield str(number).zfill(len(match[1]))
