"""A file system that is really full: a small one of its own, in a mount namespace that goes with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import orjson
import pytest
from collect_program import reward_of

from gymgate.runs.stored.record import CollectedRollout, read_values

PROGRAM = Path(__file__).with_name("collect_program.py")
NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
SCRIPT = """
set -eu
mount -t tmpfs -o size=256k none "$DISK"
code=0; "$PYTHON" "$PROGRAM" "$ROWS" "$DISK/run" 4 100 2>"$OUT/full.err" || code=$?
echo "full $code"; cp "$DISK/run/rollouts.jsonl" "$OUT/full.jsonl"
code=0; "$PYTHON" "$PROGRAM" "$ROWS" "$DISK/run" 4 100 2>"$OUT/still.err" || code=$?
echo "still $code"; cp "$DISK/run/rollouts.jsonl" "$OUT/still.jsonl"
mount -o remount,size=16m "$DISK"
code=0; "$PYTHON" "$PROGRAM" "$ROWS" "$DISK/run" 4 100 2>"$OUT/room.err" || code=$?
echo "room $code"; cp "$DISK/run/rollouts.jsonl" "$OUT/room.jsonl"
"""


def may_mount(tmp_path: Path) -> bool:
    """Whether this machine lets us have a file system of our own."""
    if shutil.which("unshare") is None:
        return False
    script = ["sh", "-c", f"mount -t tmpfs -o size=4k none {tmp_path}"]
    return subprocess.run([*NAMESPACE, *script], capture_output=True, timeout=20, check=False).returncode == 0


def test_a_full_disk_stops_a_run_that_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk, rows = tmp_path / "disk", tmp_path / "rows.jsonl"
    disk.mkdir()
    if not may_mount(disk):
        pytest.skip("no mount namespace may be made here")
    values = ({"responses_create_params": {"input": f"{number}"}} for number in range(250))
    rows.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in values))
    paths = {"DISK": disk, "ROWS": rows, "OUT": tmp_path, "PYTHON": sys.executable, "PROGRAM": PROGRAM}
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", SCRIPT],
        env={**os.environ, **{name: str(path) for name, path in paths.items()}},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    codes = [line.split() for line in done.stdout.splitlines() if line.startswith(("full", "still", "room"))]
    assert codes == [["full", "1"], ["still", "1"], ["room", "0"]], done.stderr
    for name in ("full", "still"):
        error = (tmp_path / f"{name}.err").read_text().splitlines()[-1]
        assert "/disk/run/" in error, error  # rollouts.jsonl or failures.jsonl
        assert "No space left on device" in error or "bytes fit" in error
    counts = [len(rollouts(tmp_path / f"{name}.jsonl")) for name in ("full", "still", "room")]
    assert 0 < counts[0] <= counts[1] < counts[2] == 1000
    whole = rollouts(tmp_path / "room.jsonl")
    assert set(whole.values()) == {1}
    assert set(rollouts(tmp_path / "full.jsonl")) < set(whole)
    assert all(reward == reward_of(identity) for identity, reward in whole)


def rollouts(path: Path) -> Counter[object]:
    """Every line is whole: reading raises where one is not."""
    assert path.read_bytes().endswith(b"\n")
    found = (CollectedRollout.model_validate(value) for _, value in read_values(path))
    return Counter((rollout.identity, rollout.reward) for rollout in found)
