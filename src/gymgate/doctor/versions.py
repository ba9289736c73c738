"""Which packages a trainer needs, and which versions of them work together."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Literal, NamedTuple

from gymgate.runtime.checks import Check

Trainer = Literal["trl", "verl", "tokens"]
"""`tokens`: no trainer, just what sampling over token ids needs."""


class Range(NamedTuple):
    """Versions from `low` on, below `high`; `None`: any."""

    package: str
    low: str | None = None
    high: str | None = None

    def __str__(self) -> str:
        bounds = [f">={self.low}"] * (self.low is not None) + [f"<{self.high}"] * (self.high is not None)
        return self.package + ",".join(bounds)

    def holds(self, version: str) -> bool:
        """Of a version as a package states it."""
        number = _number(version)
        above = self.low is None or number >= _number(self.low)
        return above and (self.high is None or number < _number(self.high))


_TOKENS = (Range("transformers", "4.56"), Range("renderers", "0.1.12"))
NEEDED: dict[Trainer, tuple[Range, ...]] = {
    "tokens": _TOKENS,
    "trl": (Range("trl", "1.16", "2"), Range("torch"), Range("datasets", "3"), Range("accelerate"), *_TOKENS),
    "verl": (Range("verl", "0.9.1", "0.10"), Range("torch"), Range("ray", "2.40"), *_TOKENS),
}
SERVER: dict[Trainer, Range] = {
    "tokens": Range("vllm", "0.10.2"),
    "trl": Range("vllm", "0.22", "0.32"),
    "verl": Range("vllm", "0.10.2"),
}
"""Of the vLLM server that samples."""
INSTALL: dict[Trainer, str] = {
    "tokens": "pip install 'renderers[transformers]>=0.1.12'",
    "trl": "pip install torch 'gymgate[nemogym,trl]'",
    "verl": "pip install torch 'gymgate[nemogym,verl]'",
}


def version_checks(trainer: Trainer) -> Iterator[Check]:
    """One line for each package of the matrix."""
    if trainer == "verl":
        own = ".".join(map(str, sys.version_info[:3]))
        fits = sys.version_info < (3, 13)
        advice = "" if fits else "; verl has no release for it: use Python 3.11 or 3.12"
        yield Check("Python for verl", fits, own + advice)
    for wanted in NEEDED[trainer]:
        yield _package(wanted, INSTALL[trainer])


def _package(wanted: Range, install: str) -> Check:
    try:
        version = metadata.version(wanted.package)
    except metadata.PackageNotFoundError:
        return Check(wanted.package, False, f"not installed; {install}")
    if not wanted.holds(version):
        return Check(wanted.package, False, f"{version} does not fit; pip install '{wanted}'")
    return Check(wanted.package, True, version)


def _number(version: str) -> tuple[int, ...]:
    """The release's first three numbers, whatever follows them."""
    release = re.match(r"v?(\d+(?:\.\d+)*)", version)
    parts = [int(part) for part in release[1].split(".")] if release else [0]
    return (*parts, 0, 0)[:3]
