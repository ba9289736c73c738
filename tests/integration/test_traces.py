"""`gymgate run --otel` with a collector, and with none."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.proto", reason="the extra otel is not installed")

from support.otlp import collecting
from support.stacks import SIMPLE

EARLIER = Path(__file__).parents[1] / "unit" / "earlier_run"
ERROR = 2
"""A status of OTLP."""
pytestmark = [pytest.mark.gym, pytest.mark.timeout(300)]


async def run_command(endpoint: str) -> tuple[int, str]:
    """`gymgate run` on five rows, one of which no agent can take; its exit code and messages."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gymgate", "run", SIMPLE, "--otel"),
        *("--data", str(EARLIER / "rows.jsonl"), "--replay-file", str(EARLIER / "recordings.jsonl")),
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": "2"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_a_run_exports_its_rollouts() -> None:
    async with collecting() as collector:
        code, output = await run_command(collector.url)
    assert code == 1, output
    rollouts = [
        span for service, name, span in collector.spans if (service, name) == ("gymgate", f"rollout {SIMPLE}")
    ]
    [failed] = [span for span in rollouts if span.status.code == ERROR]
    assert len(rollouts) == 5
    assert {"DataError"} < {attribute.value.string_value for attribute in failed.attributes}
    children = [span for _, name, span in collector.spans if name.startswith("chat ")]
    finished = {span.span_id for span in rollouts} - {failed.span_id}
    assert {child.parent_span_id for child in children} == finished


async def test_a_collector_that_is_not_there_costs_no_rollout() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        code, output = await run_command(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert code == 1, output
    assert "1 x DataError" in output
