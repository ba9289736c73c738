"""The types of what commands print with `--json`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from gymgate.cli import info
from gymgate.cli.aggregate import AggregatedRuns
from gymgate.cli.cache import CacheListing, RemovalRecord
from gymgate.cli.compare import ComparedRuns
from gymgate.cli.list import ListedEnvironment
from gymgate.cli.ps import StackListing
from gymgate.cli.rollout_commands import RunOutput
from gymgate.cli.setup import SetupReport
from gymgate.doctor import Finding
from gymgate.gym.preparation import BlendResult, Manifest
from gymgate.quality import CheckResult

OUTPUTS: dict[str, Any] = {
    "aggregate": AggregatedRuns,
    "cache": CacheListing,
    "cache clean": list[RemovalRecord],
    "check": list[CheckResult],
    "compare": ComparedRuns,
    "data blend": BlendResult,
    "data prepare": Manifest,
    "doctor": list[Finding],
    "info": info.EnvironmentDescription,
    "list": list[ListedEnvironment],
    "ps": StackListing,
    "rescore": RunOutput,
    "run": RunOutput,
    "setup": SetupReport,
}
"""By command."""


def read_output(command: str, text: str | bytes) -> Any:
    """Return what a command printed with `--json`, after checking that its type describes all of it, and nothing else."""
    adapter = TypeAdapter(OUTPUTS[command])
    adapter.rebuild(_types_namespace={**vars(info), "CheckResult": CheckResult})
    value = json.loads(text)
    assert adapter.dump_python(adapter.validate_json(text), mode="json") == value
    return value
