"""The packages that a trainer needs, and the versions that work together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from gymgate.core.extras import SDKS, install_command
from gymgate.doctor import Finding

Trainer = Literal["trl", "verl", "tokens"]
"""`tokens`: no trainer, just what sampling over token ids needs."""

_TOKENS = (
    "transformers>=4.56",
    "renderers>=0.1.12",
    "httpx",
)  # renderers imports httpx and does not require it
NEEDED: dict[Trainer, tuple[str, ...]] = {
    "tokens": _TOKENS,
    "trl": (f"trl>={SDKS['trl'].oldest}", "torch", "datasets>=3", "accelerate", *_TOKENS),
    "verl": (f"verl>={SDKS['verl'].oldest}", "torch", "ray>=2.40", *_TOKENS),
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
            tokens_only = "pip install 'renderers[transformers]>=0.1.12' httpx"
            install = tokens_only if trainer == "tokens" else install_command(trainer, "torch")
            yield Finding(package, False, f"not installed; {install}")
            continue
        if meets(version, requirement):
            yield installed(package, version)
        else:
            yield Finding(package, False, f"{version} does not fit; pip install '{requirement}'")


def check_sdks() -> Iterator[Finding]:
    """Yield a finding for each SDK that is installed, and for verifiers and datasets also if they are missing."""
    extras = {sdk.package: extra for extra, sdk in SDKS.items()} | {"datasets": "datasets"}
    for package, extra in extras.items():
        try:
            yield installed(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            if package in ("verifiers", "datasets"):
                yield Finding(package, None, f"not installed; {install_command(extra)}")


def installed(package: str, version: str) -> Finding:
    """Return the finding for a package that can be used; an SDK that is newer than the tested releases may not work."""
    sdk = next((sdk for sdk in SDKS.values() if sdk.package == package), None)
    untested = sdk.untested(version) if sdk is not None else None
    return Finding(package, True if untested is None else None, untested or version)


def meets(version: str, requirement: str) -> bool:
    """Return whether a version, of a pre-release or a local build too, is one that the requirement allows."""
    try:
        return Requirement(requirement).specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False
