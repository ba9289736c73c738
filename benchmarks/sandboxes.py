"""What a rollout costs in a sandbox: the same rows of `examples/own_sandbox` with the providers `local` and `docker`.

Each rollout makes a sandbox, runs three commands in it by an instant policy's script, and is scored by running the tests there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from gymgate import acquire
from gymgate.config import EnvironmentConfig, StackConfig
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


async def measure(sandbox: str, rollouts: int, concurrency: int, image: str) -> None:
    """Print one line for a provider."""
    overrides = (
        (IMAGE, image),
        *((("sandbox.docker.create.network", "none"),) if sandbox == "docker" else ()),
    )
    environment = EnvironmentConfig(name=str(CONFIG), sandbox=sandbox, overrides=overrides)
    row = json.loads((CONFIG.parents[1] / "data" / "example.jsonl").read_text().splitlines()[0])
    async with acquire(StackConfig(environments=(environment,))) as stack:
        await stack.run(row, policy=policy)
        free, lowest = _available_mb(), _available_mb()
        limit = asyncio.Semaphore(concurrency)
        seconds: list[float] = []

        async def one() -> None:
            nonlocal lowest
            async with limit:
                began = time.monotonic()
                rollout = await stack.run(row, policy=policy)
                seconds.append(time.monotonic() - began)
                lowest = min(lowest, _available_mb())
                if rollout.reward != 0.0:
                    raise SystemExit(f"{sandbox}: {rollout.status}, {rollout.error}")

        before, began = _machine_cpu_s(), time.monotonic()
        await asyncio.gather(*(one() for _ in range(rollouts)))
        wall, cpu = time.monotonic() - began, _machine_cpu_s() - before
        alone = await _alone(stack, row)
    print(
        f"{sandbox:8} {rollouts} rollouts, {concurrency} at once: {wall:.1f} s, {rollouts / wall:.1f}/s; a rollout "
        f"{statistics.median(seconds):.2f} s (alone {alone:.2f} s), {cpu / rollouts:.2f} s of the machine's processors; "
        f"memory at most {(free - lowest) / concurrency:.0f} MB for each at once"
    )


async def _alone(stack: Stack, row: dict[str, Any]) -> float:
    taken = []
    for _ in range(5):
        began = time.monotonic()
        await stack.run(row, policy=policy)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def _machine_cpu_s() -> float:
    """Seconds that all processors were busy since the start: containers are no children of ours."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def _available_mb() -> float:
    line = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")
    )
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measure the providers that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("providers", nargs="*", default=["local", "docker"])
    parser.add_argument("-n", "--rollouts", type=int, default=200)
    parser.add_argument("-c", "--concurrency", type=int, default=8)
    parser.add_argument("--image", default="gymgate-test:2", help="with a shell, base64 and Python")
    given = parser.parse_args()
    for provider in given.providers:
        asyncio.run(measure(provider, given.rollouts, given.concurrency, given.image))
