"""`inspect eval` as a user runs it, with a scripted endpoint as the model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalLog, EvalSample, read_eval_log

from support.scripted import ScriptedPolicy

INSPECT = str(Path(sys.executable).with_name("inspect"))


async def start(
    policy: ScriptedPolicy, cwd: Path, *args: str, **variables: str
) -> asyncio.subprocess.Process:
    """Start `inspect eval gymgate/nemo_gym`, which logs to `cwd`/logs."""
    model = ("--model", "openai-api/local/scripted", "--model-base-url", policy.base_url)
    return await asyncio.create_subprocess_exec(
        *(INSPECT, "eval", "gymgate/nemo_gym", *args, *model, "--log-dir", "logs", "--display", "plain"),
        cwd=cwd,
        env={**os.environ, "LOCAL_API_KEY": "unused", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


async def run(policy: ScriptedPolicy, cwd: Path, *args: str) -> EvalLog:
    """Run it to its end and return its log; what it printed is in `cwd`/printed.txt."""
    process = await start(policy, cwd, *args)
    out, _ = await process.communicate()
    (cwd / "printed.txt").write_bytes(out)
    assert process.returncode == 0, out.decode()
    return the_log(cwd)


def the_log(cwd: Path) -> EvalLog:
    (file,) = (cwd / "logs").glob("*.eval")
    return read_eval_log(str(file))


def samples_of(log: EvalLog) -> list[EvalSample]:
    assert log.samples is not None
    return sorted(log.samples, key=lambda sample: (sample.id, sample.epoch))


def score_of(sample: EvalSample) -> Any:
    assert sample.scores is not None
    return sample.scores["reward"]
