"""What tests of real stacks share: configs, a policy, and a look at processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gymgate import Stack
from gymgate.core.config import EnvironmentConfig, RuntimeConfig, StackConfig

SIMPLE = "example_single_tool_call"
SESSIONS = "example_session_state_mgmt"
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "what's it like in sf?"}],
        "tools": [
            {
                "type": "function",
                "name": "get_weather",
                "description": "",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
                "strict": True,
            }
        ],
    }
}
"""For `SIMPLE`: scores 1 if the weather tool is called."""

STOCK = bool(os.environ.get("GYMGATE_TEST_STOCK_SERVERS"))
"""Whether stacks have NeMo Gym's servers as they are, unless a test says."""
_IDS = itertools.count()


def runtime(version: str = "0.7.0") -> RuntimeConfig:
    """The release under test; `$GYMGATE_TEST_PYTHON_0_7_0` names an interpreter that has it."""
    return RuntimeConfig(
        version=version, interpreter=os.environ.get(f"GYMGATE_TEST_PYTHON_{version.replace('.', '_')}")
    )


def stack_config(
    *environments: str | EnvironmentConfig, version: str = "0.7.0", **fields: Any
) -> StackConfig:
    fields.setdefault("stock_servers", STOCK)
    return StackConfig(environments=environments or (SIMPLE,), runtime=runtime(version), **fields)


def call_then_answer(body: dict[str, Any]) -> dict[str, Any]:
    """A Responses policy: one call of the first tool, then a text."""
    items = body["input"] if isinstance(body["input"], list) else []
    if body.get("tools") and not any(item.get("type") == "function_call_output" for item in items):
        return answer(call=body["tools"][0]["name"])
    return answer()


def answer(call: str | None = None, text: str = "cold") -> dict[str, Any]:
    """A Responses answer: a tool call, or a text."""
    number = next(_IDS)
    item: dict[str, Any] = {"id": f"fc_{number}", "call_id": f"call_{number}", "type": "function_call"}
    item |= {"name": call, "arguments": '{"city": "sf"}', "status": "completed"}
    if call is None:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed"}
        item |= {"content": content}
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "model": "scripted",
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def name_of(stack: Stack, given: str) -> str:
    """The one name of an environment, which a config may give by its path."""
    name: str = stack.description["names"][given]
    return name


def server_pid(status: dict[str, Any], environment: str, server: str) -> int:
    pid: int = status["environments"][environment]["servers"][server]["pid"]
    return pid


def pids_of(status: dict[str, Any]) -> list[int]:
    """Every process of a stack."""
    servers = [
        server["pid"] for place in status["environments"].values() for server in place["servers"].values()
    ]
    return [status["pid"], *status["fork_servers"], *servers]


def alive(pids: Iterable[int]) -> list[int]:
    """Those that run; a zombie does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


LOOPBACK = {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as `listening` gives them."""
_LISTEN = "0A"


def listening(pid: int) -> set[str]:
    """Addresses (hex, as in /proc/net/tcp) that a process listens on. Raises `OSError` if it is gone."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if found := re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink())):
            inodes.add(found[1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                addresses.add(fields[1].partition(":")[0])
    return addresses


async def all_gone(pids: Iterable[int], seconds: float = 5.0) -> bool:
    """Whether every process ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while left := alive(pids):
        if time.monotonic() > deadline:
            print("still there:", left)
            return False
        await asyncio.sleep(0.02)
    return True
