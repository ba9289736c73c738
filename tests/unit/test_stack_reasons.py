"""What is told of a server that died while starting."""

from __future__ import annotations

import pytest

from gymgate.stack.children import reason_in

PYDANTIC = """Traceback (most recent call last):
  File "app.py", line 1, in <module>
    Server.run_webserver()
pydantic_core._pydantic_core.ValidationError: 1 validation error for HaystackAgentConfig
pipeline_yaml
  Field required [type=missing, input_value={}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/missing
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            PYDANTIC,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for HaystackAgentConfig pipeline_yaml "
            "Field required [type=missing, input_value={}, input_type=dict]",
        ),
        ("ValueError: first\n  File x\nRuntimeError: no such luck\n", "RuntimeError: no such luck"),
        ("starting\n\nsegmentation fault\n", "segmentation fault"),
        ("", ""),
    ],
    ids=["pydantic", "the last of two", "no exception", "nothing"],
)
def test_reason(log: str, reason: str) -> None:
    assert reason_in(log) == reason
