"""The nodes of a Slurm job, from the variables that Slurm sets in it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping

from gymgate.errors import ConfigError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
LARGEST = 100_000
"""Nodes of one list; more is a mistake."""


def job_nodes(environment: Mapping[str, str] = os.environ, group: int | None = None) -> list[str]:
    """Hostnames of the job that this process is part of; of one group of a heterogeneous job, or of its only one.

    Raises `ConfigError` outside of a job, and for a list that is none.
    """
    suffix = "" if group is None else f"_HET_GROUP_{group}"
    names = (f"SLURM_JOB_NODELIST{suffix}", f"SLURM_NODELIST{suffix}")
    for name in names:
        if text := environment.get(name):
            return expand(text)
    raise ConfigError(f"not in a Slurm job: {names[0]} is not set; name the servers' addresses instead")


def expand(text: str) -> list[str]:
    """`node[01-03,7],login` as `node01 node02 node03 node7 login`. Raises `ConfigError`."""
    found: list[str] = []
    for part in _parts(text):
        found += _expand_part(part, text)
        if len(found) > LARGEST:
            raise ConfigError(f"Slurm node list {text!r} has more than {LARGEST:,} nodes")
    if not found:
        raise ConfigError(f"Slurm node list {text!r} names no node")
    return found


def _parts(text: str) -> Iterator[str]:
    """Split at the commas that are not within brackets."""
    depth, start = 0, 0
    for place, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ConfigError(f"Slurm node list {text!r}: brackets do not match")
        if character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise ConfigError(f"Slurm node list {text!r}: brackets do not match")
    yield text[start:]


def _expand_part(part: str, whole: str) -> list[str]:
    if not part or part != part.strip():
        raise ConfigError(f"Slurm node list {whole!r} has an empty entry")
    pieces = _BRACKETS.split(part)
    choices = [list(_numbers(piece, whole)) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(text: str, whole: str) -> Iterator[str]:
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(f"Slurm node list {whole!r}: {part!r} is no number or range")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + LARGEST:
            raise ConfigError(f"Slurm node list {whole!r}: {part!r} is no range")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
