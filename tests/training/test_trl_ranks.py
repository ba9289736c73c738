"""Two ranks on one machine: each rolls out its own part of a group, on one stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

pytestmark = [pytest.mark.gym, pytest.mark.timeout(240)]


def ranks_of(folder: Path, *arguments: str, timeout_s: float = 600) -> list[dict[str, Any]]:
    """What the two ranks of a training wrote."""
    program = Path(__file__).with_name("trl_ranks_program.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(program), str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_each_rank_rolls_out_its_part_on_one_stack(tmp_path: Path) -> None:
    """A group of six lies across both: three prompts each, and one mean over all.

    The second rank's rollouts fail, batch after batch. That ends no training in which the other's do not, and the one
    that scores counts as one of four, not as half of them.
    """
    ranks = ranks_of(tmp_path)
    assert [rank["batches"] for rank in ranks] == [[3] * 4] * 2
    assert [rank["share"] for rank in ranks] == ["machine", "machine"]
    assert ranks[0]["servers"] == ranks[1]["servers"]
    log = ranks[0]["log"]
    assert [entry["nemo_gym/letter_share/failed"] for entry in log] == pytest.approx([1 / 2] * 3 + [1 / 3])
    assert log[-1]["reward"] > 0
    for entry in log:
        assert entry["nemo_gym/letter_share/reward"] == pytest.approx(entry["reward"], abs=1e-5)
