"""What tests of sandboxes share: the example's environment and rows, a policy that follows a script, and a look at containers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from gymgate.core.config import EnvironmentConfig, RuntimeConfig, StackConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_sandbox"
CONFIG = EXAMPLE / "resources_servers" / "fix_repo" / "configs" / "fix_repo.yaml"
ROWS = [json.loads(line) for line in (CONFIG.parents[1] / "data" / "example.jsonl").read_text().splitlines()]
REPAIRED = """def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
"""
"""What makes the tests of the first row pass."""
SOLVE = (
    "ls && cat intervals.py",
    "python3 -m unittest -q 2>&1 | tail -3",
    f"cat > intervals.py <<'END'\n{REPAIRED}END",
    "python3 -m unittest -q && hostname",
)
GIVE_UP = ("ls",)

_IDS = itertools.count()
Policy = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def fix_repo(sandbox: str | None, *settings: tuple[str, Any], **fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig(name=str(CONFIG), sandbox=sandbox, overrides=settings, **fields)


def stack_config(*environments: EnvironmentConfig, **fields: Any) -> StackConfig:
    interpreter = os.environ.get("GYMGATE_TEST_PYTHON_0_7_0")
    return StackConfig(
        environments=environments, runtime=RuntimeConfig(version="0.7.0", interpreter=interpreter), **fields
    )


def follows(
    commands: Sequence[str], outputs: list[str] | None = None, goes_on: asyncio.Event | None = None
) -> Policy:
    """A chat policy that calls the tool `bash` with each command in turn and then says that it is done.

    It appends what the tool gave to `outputs`, and answers a second request once `goes_on` is set.
    """

    async def policy(body: dict[str, Any]) -> dict[str, Any]:
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if outputs is not None and results:
            outputs.append(str(results[-1]))
        if goes_on is not None and results:
            await goes_on.wait()
        return chat(commands[len(results)] if len(results) < len(commands) else None)

    return policy


def chat(command: str | None) -> dict[str, Any]:
    """A chat-completions answer: a call of `bash`, or the end."""
    number = next(_IDS)
    message: dict[str, Any] = {"role": "assistant", "content": "done"}
    if command is not None:
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    finish = "stop" if command is None else "tool_calls"
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def containers() -> list[str]:
    """The ids (also their hostnames) of all containers that Gym's servers have started, running or not."""
    command = ["docker", "ps", "-a", "--filter", "label=nemo-gym.sandbox=1", "--format", "{{.ID}}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()


async def no_containers(seconds: float = 10.0, but: Collection[str] = ()) -> float | None:
    """Seconds until there is no container any more but these; `None` if one is there after so many."""
    began = time.monotonic()
    while {*await asyncio.to_thread(containers)} - {*but}:
        if time.monotonic() - began > seconds:
            return None
        await asyncio.sleep(0.1)
    return time.monotonic() - began
