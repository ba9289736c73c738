"""`autoqc_artifact.json`: a check as NeMo Gym's issue 2557 describes its QC artifact, for CI."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from gymgate.gym.catalog import Environment
from gymgate.quality.model import CheckResult, Thresholds
from gymgate.quality.record.findings import SUSPICIONS, problems
from gymgate.quality.sections import Section

_TIMED = ("cost", "policy")
"""Sections that differ from run to run."""


def artifact(
    record: CheckResult, environment: Environment, thresholds: Thresholds, unmet: Sequence[str]
) -> dict[str, Any]:
    """Say what was evaluated, what was skipped and why, metrics, findings and a verdict. Nothing in it depends on the time."""
    sections = {name: section for name, section in record if isinstance(section, Section)}
    flags = [to_jsonable_python(problem._asdict()) for problem in problems(record)]
    return {
        "schema": "gymgate autoqc_artifact 1",
        **record.model_dump(
            include={"kind", "environment", "config", "nemo_gym", "gymgate", "verdict", "matched", "compared"}
        ),
        "files_sha256": _digest(environment),
        "evaluated": sorted(sections),
        "skipped": record.missing
        | {
            f"{name}: {what}": why
            for name, section in sections.items()
            for what, why in section.missing.items()
        },
        "metrics": {
            name: section.model_dump(mode="json", exclude={"missing"}, exclude_defaults=True)
            for name, section in sections.items()
            if name not in _TIMED
        },
        "suspicions": [flag for flag in flags if flag["kind"] in SUSPICIONS and not flag["proof"]],
        "findings": [flag for flag in flags if flag["kind"] not in SUSPICIONS or flag["proof"]],
        "thresholds": thresholds.model_dump(exclude_defaults=True),
        "unmet": [*unmet],
        "passed": not unmet and record.verdict not in ("differs", "failed", "blocked"),
    }


_DIGESTED = (".py", ".yaml", ".yml", ".toml", ".txt", ".jsonl")
"""Not what a check writes beside them."""


def _digest(environment: Environment) -> str:
    """A hash of the environment's files: code, configs and rows."""
    root = environment.path if environment.path.is_dir() else environment.path.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        hidden = any(part.startswith((".", "__pycache__")) for part in name.parts)
        if path.is_file() and not hidden and path.suffix in _DIGESTED:
            digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
