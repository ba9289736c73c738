"""The items that each release's own model server gives its agents: the other side of the table in docs/agreement.md."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gymgate.core.config import SUPPORTED_NEMO_GYM, RuntimeConfig
from gymgate.gym.runtime import clean_env, ensure_runtime
from support.answer_items import ROWS, items_of

# The first use of a release installs it.
pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]


@pytest.mark.parametrize("version", SUPPORTED_NEMO_GYM)
def test_the_table_says_what_the_release_does(version: str) -> None:
    runtime = ensure_runtime(RuntimeConfig(version=version))
    done = subprocess.run(
        [runtime.python, Path(__file__).with_name("gym_model_server.py")],
        input=json.dumps([row.choice for row in ROWS.values()]),
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers = json.loads(done.stdout)
    items = {name: body and items_of(body) for name, body in zip(ROWS, answers, strict=True)}
    assert items == {name: row.nemo_gym.get(version, row.items) for name, row in ROWS.items()}
    statuses = {name: body["status"] for name, body in zip(ROWS, answers, strict=True) if body}
    assert statuses == {name: ROWS[name].status for name in statuses}
