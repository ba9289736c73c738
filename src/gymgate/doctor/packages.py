"""The packages that a trainer needs, and the versions that work together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from gymgate.core.extras import install_command
from gymgate.doctor import Finding

Trainer = Literal["trl", "verl", "tokens"]
"""`tokens`: no trainer, just what sampling over token ids needs."""

_TOKENS = ("transformers>=4.56", "renderers>=0.1.12")
NEEDED: dict[Trainer, tuple[str, ...]] = {
    "tokens": _TOKENS,
    "trl": ("trl>=1.15,<2", "torch", "datasets>=3", "accelerate", *_TOKENS),
    "verl": ("verl>=0.9.1,<0.10", "torch", "ray>=2.40", *_TOKENS),
}
SERVER: dict[Trainer, str] = {"tokens": "vllm>=0.10.2", "trl": "vllm>=0.22,<0.32", "verl": "vllm>=0.10.2"}
"""The vLLM server that samples."""


def check_versions(trainer: Trainer) -> Iterator[Finding]:
    """Yield a finding for each package that the trainer needs."""
    if trainer == "verl":
        python = ".".join(map(str, sys.version_info[:3]))
        fits = sys.version_info < (3, 13)
        advice = "" if fits else "; verl has no release for it: use Python 3.11 or 3.12"
        yield Finding("Python for verl", fits, python + advice)
    for requirement in NEEDED[trainer]:
        package = Requirement(requirement).name
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            tokens_only = "pip install 'renderers[transformers]>=0.1.12'"
            install = tokens_only if trainer == "tokens" else install_command(f"nemogym,{trainer}", "torch")
            yield Finding(package, False, f"not installed; {install}")
            continue
        fits = meets(version, requirement)
        yield Finding(
            package, fits, version if fits else f"{version} does not fit; pip install '{requirement}'"
        )


def meets(version: str, requirement: str) -> bool:
    """Return whether a version, of a pre-release or a local build too, is one that the requirement allows."""
    try:
        return Requirement(requirement).specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False
