"""What a rollout costs in a sandbox: the same rows of `examples/own_sandbox` with the providers `local` and `docker`.

Each rollout makes a sandbox, runs three commands in it by an instant policy's script, and is scored by running the tests there.

On a machine that does other work, too, give `--cgroup` a control group with this program and the Docker daemon, and that of the
containers, such as /sys/fs/cgroup/cpuacct/docker: processor time and memory are then of these. Else they are the whole machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymgate import acquire
from gymgate.core.config import EnvironmentConfig, StackConfig
from gymgate.rollouts import Rollout
from gymgate.stack import Stack

CONFIG = Path(__file__).parents[1] / "examples/own_sandbox/resources_servers/fix_repo/configs/fix_repo.yaml"
IMAGE = "fix_repo.resources_servers.fix_repo.sandbox_spec.image"
COMMANDS = ("ls", "cat intervals.py", "python3 -m unittest -q")


async def policy(body: dict[str, Any]) -> dict[str, Any]:
    """The commands in turn, then the end."""
    done = sum(message["role"] == "tool" for message in body["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": "done"}
    if done < len(COMMANDS):
        function = {"name": "bash", "arguments": json.dumps({"command": COMMANDS[done]})}
        calls = [{"id": f"call_{done}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "scripted", "choices": [choice]}


async def measure(sandbox: str, rollouts: int, concurrency: int, image: str, cgroups: Sequence[Path]) -> None:
    """Print one line for a provider."""
    overrides = (
        (IMAGE, image),
        *((("sandbox.docker.create.network", "none"),) if sandbox == "docker" else ()),
    )
    environment = EnvironmentConfig(name=str(CONFIG), sandbox=sandbox, overrides=overrides)
    row = json.loads((CONFIG.parents[1] / "data" / "example.jsonl").read_text().splitlines()[0])
    async with acquire(StackConfig(environments=(environment,))) as stack:
        await stack.run(row, policy=policy)
        most = least = _used_mb(cgroups)
        limit = asyncio.Semaphore(concurrency)
        seconds: list[float] = []

        async def one() -> Rollout:
            nonlocal most
            async with limit:
                began = time.monotonic()
                rollout = await stack.run(row, policy=policy)
                seconds.append(time.monotonic() - began)
                most = max(most, _used_mb(cgroups))
                return rollout

        before, began = _cpu_s(cgroups), time.monotonic()
        done = await asyncio.gather(*(one() for _ in range(rollouts)))
        wall, cpu = time.monotonic() - began, _cpu_s(cgroups) - before
        alone = await _alone(stack, row)
    if failed := [rollout for rollout in done if rollout.reward != 0.0]:
        raise SystemExit(f"{sandbox}: {len(failed)} rollouts {failed[0].status}, {failed[0].error}")
    print(
        f"{sandbox:8} {rollouts} rollouts, {concurrency} at once: {wall:.1f} s, {rollouts / wall:.1f}/s; a rollout "
        f"{statistics.median(seconds):.2f} s (alone {alone:.2f} s), {cpu / rollouts:.2f} s of processor time; "
        f"memory at most {(most - least) / concurrency:.0f} MB for each at once"
    )


async def _alone(stack: Stack, row: dict[str, Any]) -> float:
    taken = []
    for _ in range(5):
        began = time.monotonic()
        await stack.run(row, policy=policy)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def _cpu_s(cgroups: Sequence[Path]) -> float:
    """Seconds of processor time since some start: containers are no children of ours."""
    if cgroups:
        return sum(_cgroup_cpu_s(group) for group in cgroups)
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def _cgroup_cpu_s(group: Path) -> float:
    if (usage := group / "cpuacct.usage").is_file():  # version 1
        return int(usage.read_text()) / 1e9
    return int((group / "cpu.stat").read_text().split()[1]) / 1e6


def _used_mb(cgroups: Sequence[Path]) -> float:
    if cgroups:
        # A container's group may be gone at any moment; os.walk does not mind.
        groups = (Path(path) for group in cgroups for path, _, _ in os.walk(group))
        return sum(_pss_mb(process) for group in groups for process in _read(group / "cgroup.procs").split())
    kb = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    return (kb["MemTotal"] - kb["MemAvailable"]) / 1024


def _pss_mb(process: str) -> float:
    """Its memory, with its part of what it shares with others; 0 if it has ended."""
    lines = _read(Path("/proc", process, "smaps_rollup")).splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def _read(path: Path) -> str:
    """Its text; empty if it is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def main() -> None:
    """Measure the providers that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("providers", nargs="*", default=["local", "docker"])
    parser.add_argument("-n", "--rollouts", type=int, default=200)
    parser.add_argument("-c", "--concurrency", type=int, default=8)
    parser.add_argument("--image", default="gymgate-test:2", help="with a shell, base64 and Python")
    parser.add_argument("--cgroup", action="append", type=Path, default=[], help="directory; repeatable")
    given = parser.parse_args()
    for provider in given.providers:
        asyncio.run(measure(provider, given.rollouts, given.concurrency, given.image, given.cgroup))
