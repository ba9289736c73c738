"""What tests of real stacks share: a policy, an environment with faults of our own, and a look at processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gymgate.config import EnvironmentConfig, RuntimeConfig, StackConfig

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

_IDS = itertools.count()

SERVER = """
import os, subprocess, sys, time
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)

class Config(BaseResourcesServerConfig):
    fault: str = "none"
    tool: str = "none"

class Faulty(SimpleResourcesServer):
    ray_enabled = False
    config: Config

    def setup_webserver(self):
        if self.config.fault == "die":
            raise RuntimeError("no such luck")
        if self.config.fault == "hang":
            time.sleep(600)
        if self.config.fault == "once":
            marker = os.path.join(os.path.dirname(__file__), "started")
            if os.path.exists(marker):
                raise RuntimeError("only once")
            open(marker, "w").close()
        app = super().setup_webserver()
        app.post("/get_weather")(self.get_weather)
        return app

    async def get_weather(self, body: dict) -> dict:
        if self.config.tool == "helper":
            helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
            return {"helper": helper.pid}
        if self.config.tool == "exit":
            os._exit(3)
        return {}

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        if self.config.fault == "verify":
            raise ValueError("the answer\\nis not\\nverifiable")
        if self.config.fault == "judge":
            grading = await self.server_client.post(
                server_name="judge_model", url_path="/v1/responses", json={"input": "is it cold?"})
            if grading.status != 200:
                return BaseVerifyResponse(**body.model_dump(), reward=0.0, mask_sample=True, failure_kind="judge_failed")
            return BaseVerifyResponse(**body.model_dump(), reward=1.0)
        return BaseVerifyResponse(**body.model_dump(), reward=0.5)

if __name__ == "__main__":
    Faulty.run_webserver()
"""
CONFIG = """
faulty:
  resources_servers:
    faulty:
      entrypoint: app.py
      domain: other
      verified: false
      description: a server with faults
      value: tests
      fault: none
      tool: none
judge_model:
  responses_api_models:
    openai_model:
      entrypoint: app.py
      openai_base_url: ${judge_base_url}
      openai_api_key: ${judge_api_key}
      openai_model: ???
faulty_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: faulty}
      model_server: {type: responses_api_models, name: policy_model}
"""


def runtime(version: str = "0.7.0") -> RuntimeConfig:
    """The release under test; `$GYMGATE_TEST_PYTHON_0_7_0` names an interpreter that has it."""
    return RuntimeConfig(
        version=version, interpreter=os.environ.get(f"GYMGATE_TEST_PYTHON_{version.replace('.', '_')}")
    )


def stack_config(
    *environments: str | EnvironmentConfig, version: str = "0.7.0", **fields: Any
) -> StackConfig:
    return StackConfig(environments=environments or (SIMPLE,), runtime=runtime(version), **fields)


def faulty(directory: Path, **settings: Any) -> EnvironmentConfig:
    """An environment of a user's own; `settings` are those of its resources server."""
    home = directory / "resources_servers" / "faulty"
    if not home.exists():
        (home / "configs").mkdir(parents=True)
        (home / "app.py").write_text(SERVER)
        (home / "configs" / "faulty.yaml").write_text(CONFIG)
    overrides = tuple((f"faulty.resources_servers.faulty.{key}", value) for key, value in settings.items())
    return EnvironmentConfig(name=str(home / "configs" / "faulty.yaml"), overrides=overrides)


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
