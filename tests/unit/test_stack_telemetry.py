"""When NeMo Gym's telemetry needs packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig
from gymgate.gym.open_needs import telemetry_requirements


@pytest.mark.parametrize(
    ("file", "given", "enabled"),
    [
        ("", {}, False),
        ("telemetry: {enabled: true}", {}, True),
        ("telemetry: {enabled: true}", {"telemetry.enabled": False}, False),
        ("other: 1", {"telemetry.enabled": True}, True),
        ("", {"telemetry": {"enabled": True}}, True),
        ("telemetry: {span_groups: all}", {}, False),
    ],
)
def test_what_it_needs_is_installed_if_it_is_on(
    file: str, given: dict[str, Any], enabled: bool, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(file)
    spec = EnvironmentConfig(name="mcqa", overrides=given)
    needed = telemetry_requirements(spec, [path], "0.7.0")
    assert [each.partition("[")[0] for each in needed[:1]] == (["nemo-lens"] if enabled else [])
    assert telemetry_requirements(spec, [path], "0.6.0") == ()
