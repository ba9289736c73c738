"""The examples run as written, and the environment of one's own is scored by its own server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gymgate

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = EXAMPLES / "own_environment" / "resources_servers" / "letter_share" / "configs" / "letter_share.yaml"

pytestmark = [pytest.mark.gym, pytest.mark.warm]


@pytest.mark.parametrize(
    ("program", "expected"),
    [("run_environment.py", "completed 1.0"), ("own_policy.py", "reward 1.0 after 2 model calls")],
)
def test_an_example_runs(program: str, expected: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.heavy  # `gymgate check` scores its recordings, in test_own_environment.py
async def test_an_environment_of_ones_own_runs_by_path() -> None:
    async def policy(request: dict[str, object]) -> dict[str, object]:
        message = {"role": "assistant", "content": "aaab"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    rows = list(gymgate.open_rows(str(OWN)))
    async with gymgate.acquire(gymgate.StackConfig(environments=(str(OWN),))) as stack:
        first = await stack.run(rows[0].data, policy=policy)
        named = await stack.run(rows[1].data, policy=policy, environment="letter_share")
    assert (first.status, first.reward, first.metrics["answer_length"]) == ("completed", 0.75, 4.0)
    assert named.reward == 0.25
