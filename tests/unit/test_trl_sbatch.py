"""examples/trl/train.sbatch, with programs in place of Slurm's that write down how they were called."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "scontrol": 'printf "%s\\n" ${NODES}',
    "python": f'exec {sys.executable} "$@"',
    "srun": """
for word in "$@"; do case $word in --*) ;; *) break ;; esac; shift; done
export SLURM_NODEID=0
exec "$@" """,
    "vllm": """
printf "%s " "$@" > "$SEEN/vllm"
[ "${VLLM_FAILS:-}" = "" ] || exit 3
exec sleep 60""",
    "accelerate": """
[ "${VLLM_FAILS:-}" = "" ] || exec sleep 60
until [ -s "$SEEN/vllm" ]; do :; done
printf "%s " "$@" > "$SEEN/accelerate"
exit "${TRAINER_STATUS:-0}" """,
}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def submit(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, dict[str, list[str]]]:
    """Exit code, standard error, and the words that each program was called with."""
    (folder / "bin").mkdir()
    for name, body in PROGRAMS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(stat.S_IRWXU)
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SEEN": str(folder),
        "NODES": "n1 n2 n3",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_ID": "12345",
        "SLURM_GPUS_ON_NODE": "8",
        **variables,
    }
    done = subprocess.run(
        ["bash", "examples/trl/train.sbatch", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    seen = {
        name: (folder / name).read_text().split()
        for name in ("vllm", "accelerate")
        if (folder / name).exists()
    }
    return done.returncode, done.stderr, seen


def test_the_first_node_serves_and_the_others_train(tmp_path: Path) -> None:
    code, error, seen = submit(tmp_path, "examples/trl/workplace.yaml", "outputs/checkpoint-7")
    assert code == 0, error
    assert seen["vllm"][:2] == ["serve", "Qwen/Qwen3-4B-Instruct-2507"]
    assert seen["vllm"][seen["vllm"].index("--port") + 1] == "22345"
    words = " ".join(seen["accelerate"])
    assert words.startswith(
        "launch --num_machines 2 --num_processes 16 --main_process_ip n2 --main_process_port 22346 --machine_rank 0 "
    )
    assert words.endswith(
        "train.py --config examples/trl/workplace.yaml --vllm_server_base_url http://n1:22345"
        " --resume_from_checkpoint outputs/checkpoint-7"
    )


def test_a_failed_training_fails_the_job(tmp_path: Path) -> None:
    assert submit(tmp_path, "examples/trl/workplace.yaml", TRAINER_STATUS="7")[0] == 7


def test_a_dead_server_ends_the_job(tmp_path: Path) -> None:
    code, error, _ = submit(tmp_path, "examples/trl/workplace.yaml", VLLM_FAILS="1")
    assert code == 1
    assert "(exit code 3)" in error


def test_one_node_is_refused(tmp_path: Path) -> None:
    code, error, seen = submit(tmp_path, "examples/trl/workplace.yaml", NODES="n1")
    assert (code, seen) == (2, {})
    assert "two nodes" in error
