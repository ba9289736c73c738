"""A real vLLM on a GPU, started by `gymgate serve-policy`; GYMGATE_TEST_MODEL names the model, a path or a hub's name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gymgate.cluster.servers import gpus_here
from gymgate.runs.stored.layout import ROLLOUTS
from gymgate.runs.stored.record import read_values
from support.stacks import SIMPLE, runtime

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("how", ["--data-parallel", "--replicas"])
def test_rollouts_of_a_vllm_that_we_start(tmp_path: Path, how: str) -> None:
    model = os.environ.get("GYMGATE_TEST_MODEL")
    if shutil.which("vllm") is None or not gpus_here() or not model:
        pytest.skip("needs vllm on PATH, a GPU, and a model's name in GYMGATE_TEST_MODEL")
    found = runtime()
    gym = f"{found.version}@{found.interpreter}" if found.interpreter else found.version
    collect = f"{sys.executable} -m gymgate run {SIMPLE} -o {tmp_path}/run -r 2 --gym {gym} -b {{urls}}"
    serve = [
        sys.executable,
        "-m",
        "gymgate",
        "serve-policy",
        model,
        how,
        str(len(gpus_here())),
        "--run",
        collect,
    ]
    tools = ["--", "--max-model-len", "8192", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    done = subprocess.run([*serve, *tools], capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(read_values(tmp_path / "run" / ROLLOUTS))) == 10
