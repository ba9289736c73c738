"""Rows without the answer that scoring reads: NeMo Gym scores them, so they are warned of. No packaged row is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

import gymgate
from gymgate.core.errors import ConfigError
from gymgate.gym.records import answer_fields
from gymgate.gym.row_sources import open_sources
from gymgate.gym.runtime import open_catalog
from gymgate.runs.described.plan import RolloutPlan
from support.stacks import runtime

pytestmark = [pytest.mark.gym, pytest.mark.warm]


def test_no_packaged_row_is_warned_of() -> None:
    tried = 0
    for environment in open_catalog(runtime()).environments():
        if environment.name not in answer_fields():
            continue
        try:
            sources = open_sources("example", {environment.name: environment})
        except ConfigError:  # its rows are to be prepared
            continue
        assert RolloutPlan(sources).warnings == []
        tried += 1
    assert tried > 30


async def test_such_a_row_is_run_and_scored_by_nemo_gym(tmp_path: Path) -> None:
    first, second = (dict(row.data) for row in gymgate.open_rows("mcqa", runtime=runtime())[:2])
    del second["expected_answer"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in (first, second)))
    lines: list[str] = []

    def policy(request: dict[str, Any]) -> str:
        return f"Answer: {first['expected_answer']}"

    rollouts = gymgate.collect("mcqa", path, policy=policy, runtime=runtime(), progress=lines.append)
    rewards = {rollout.line: rollout.reward async for rollout in rollouts}
    assert rewards.keys() == {1, 2}
    assert rewards[2] == 0.0
    [warning] = [line for line in lines if line.startswith("warning: ")]
    assert "'expected_answer'" in warning
    assert f"{path}:2" in warning
