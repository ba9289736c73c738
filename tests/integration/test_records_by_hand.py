"""Eleven shipped records agree with figures that a script makes without gymgate."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import RuntimeConfig
from gymgate.gym.runtime import ensure_runtime
from gymgate.quality.record.storage import shipped_record

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(600)]

ENVIRONMENTS = (
    "arc_agi", "bunsenbench_chemistry_mcq", "calendar", "circle_count", "citation_if", "equivalence_rule",
    "example_single_tool_call", "format_verification", "gpqa_diamond", "hotpotqa_qa", "mcqa",
)  # fmt: skip


def claims(name: str) -> dict[str, Any]:
    record = shipped_record("resources_servers", name, "0.7.0")
    assert record is not None, name
    assert record.probes is not None
    assert record.deterministic is not None
    assert record.shape is not None
    free = {key: record.probes.answers[key].mean for key in ("empty", "fixed sentence", "the prompt")}
    return {
        "again": [record.matched, record.compared],
        "changed": len(record.deterministic.changed),
        "recorded mean": record.shape.reward_mean,
        **free,
    }


def test_records_agree_with_figures_made_without_gymgate() -> None:
    python = ensure_runtime(RuntimeConfig(version="0.7.0")).python
    done = subprocess.run(
        [python, Path(__file__).with_name("records_by_hand.py")],
        input=json.dumps({name: claims(name) for name in ENVIRONMENTS}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
