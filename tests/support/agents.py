"""What tests of agents share: an environment that any agent can serve, and policies that stamp all they say."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

STAMP = re.compile(r"stamp-(\d+)-")

SERVER = """
import json
from typing import ClassVar
from pydantic import ConfigDict
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)

class Request(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")

class Response(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")

class Stamps(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: BaseResourcesServerConfig

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/echo")(self.echo)
        return app

    async def echo(self, body: dict) -> dict:
        return body

    async def verify(self, body: Request) -> Response:
        said = json.dumps(body.response.model_dump())
        once_more = {"needs_correction": body.model_extra.get("turn_index") == 0, "correction_prompt": body.stamp}
        return Response(**body.model_dump(), reward=float(body.stamp in said), **once_more)

if __name__ == "__main__":
    Stamps.run_webserver()
"""
OWN_AGENT = """
import asyncio, json, os
from typing import ClassVar
import aiohttp
from pydantic import ConfigDict
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ResourcesServerRef

class Config(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    base_url: str

class Request(BaseRunRequest):
    model_config = ConfigDict(extra="allow")

class Response(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")

LEFT = []

class Forgetful(SimpleResponsesAPIAgent):
    "Asks its model by a URL of its own, with nothing of the rollout but the prompt."
    ray_enabled: ClassVar[bool] = False
    config: Config

    async def responses(self, body: dict) -> dict:
        raise NotImplementedError

    async def ask(self, session, text):
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        async with session.post(self.config.base_url + "/chat/completions", json=body) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]

    async def late(self, text):
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(0.01)
                await self.ask(session, text)

    async def run(self, body: Request) -> Response:
        row = body.model_dump(mode="json")
        prompt = row["responses_create_params"]["input"][0]["content"]
        if row.get("fault") == "die":
            os._exit(3)
        async with aiohttp.ClientSession() as session:
            first = await self.ask(session, prompt)
            said = await self.ask(session, prompt + first)
        if row.get("fault") == "late":
            LEFT.append(asyncio.create_task(self.late(prompt)))
        content = [{"type": "output_text", "text": said, "annotations": []}]
        message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
        response = {"id": "resp_1", "object": "response", "created_at": 0, "model": "m", "output": [message],
                    "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        verified = await self.server_client.post(
            server_name=self.config.resources_server.name, url_path="/verify", json=row | {"response": response})
        return Response.model_validate(await verified.json())

if __name__ == "__main__":
    Forgetful.run_webserver()
"""
ECHO = {
    "type": "function",
    "name": "echo",
    "description": "Says the same again.",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "strict": True,
}


def stamp_of(number: int) -> str:
    return f"stamp-{number}-"


def environment_with(directory: Path, agent_type: str, server: str = "stamps", **settings: Any) -> str:
    """The path of a user's own config: an agent, and a server, by default one that looks for the row's stamp in the answer."""
    home = directory / "resources_servers" / "stamps"
    (home / "configs").mkdir(parents=True, exist_ok=True)
    (home / "app.py").write_text(SERVER)
    about = {"domain": "other", "verified": False, "description": "stamps", "value": "tests"}
    block = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": server},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        **settings,
    }
    config = {
        server: {"resources_servers": {server: {"entrypoint": "app.py", **about}}},
        "agent": {
            "responses_api_agents": {agent_type: {key: v for key, v in block.items() if v is not None}}
        },
    }
    path = home / "configs" / f"{agent_type}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def environment_with_forgetful_agent(directory: Path, agent_type: str = "forgetful") -> str:
    """The same with an agent of the user's own that knows the policy's URL and passes nothing on."""
    home = directory / "responses_api_agents" / "forgetful"
    home.mkdir(parents=True, exist_ok=True)
    (home / "app.py").write_text(OWN_AGENT)
    return environment_with(directory, agent_type, model_server=None, base_url="${policy_base_url}")


def environment_with_turns(directory: Path, agent_type: str) -> str:
    """The same on the release's own example of an environment with turns."""
    return environment_with(directory, agent_type, server="example_multi_turn_gymnasium")


AVIARY = """
from typing import ClassVar
from aviary.core import DummyEnv, TaskDataset
from resources_servers.aviary.app import AviaryResourcesServer

class Stories(TaskDataset):
    def get_new_env_by_idx(self, idx):
        return DummyEnv(task=f"Say stamp-{idx}- by print_story.")

    def __len__(self):
        return 1000

class Server(AviaryResourcesServer[DummyEnv, Stories]):
    ray_enabled: ClassVar[bool] = False
    dataset: Stories = Stories()

if __name__ == "__main__":
    Server.run_webserver()
"""


def environment_with_aviary(directory: Path, agent_type: str, **settings: Any) -> str:
    """The same on Aviary's own small environment, which needs no data set."""
    home = directory / "resources_servers" / "stories"
    home.mkdir(parents=True)
    (home / "app.py").write_text(AVIARY)
    (home / "requirements.txt").write_text("fhaviary\ntenacity\n")
    return environment_with(directory, agent_type, server="stories", **settings)


VERIFIERS = """
import verifiers as vf
from datasets import Dataset

def found(completion, answer, **_):
    return float(answer in str(completion))

def load_environment(**_):
    rows = Dataset.from_list([{"question": "unused", "answer": "unused"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[found]))
"""


def verifiers_environment(directory: Path, agent_type: str, **settings: Any) -> str:
    """The same on an environment of verifiers', which the agent runs by itself."""
    (directory / "stamps_vf.py").write_text(VERIFIERS)
    return environment_with(directory, agent_type, **settings)


def stamped_row(number: int, **fields: Any) -> dict[str, Any]:
    """A row whose prompt carries the stamp that its answer must carry."""
    prompt = f"Say {stamp_of(number)} and nothing else."
    params = {"input": [{"role": "user", "content": prompt}]}
    return {"responses_create_params": params, "stamp": stamp_of(number), **fields}


class StampingPolicy:
    """Speaks chat-completions. Calls a tool once if it knows one that is offered, then answers, all with its stamp.

    `tools` gives a known tool's arguments for the stamp; `says` its final words.
    """

    def __init__(
        self,
        number: int,
        tools: Mapping[str, Callable[[str], dict[str, Any]]],
        says: Callable[[str, dict[str, Any]], str] = lambda stamp, request: stamp,
    ) -> None:
        self.number = number
        self.seen: set[int] = set()
        self.calls = 0
        self.used: list[str] = []
        self._tools = tools
        self._says = says
        self._ids = itertools.count(1)

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        self.seen |= {int(stamp) for stamp in STAMP.findall(json.dumps(request))}
        stamp = stamp_of(self.number)
        message: dict[str, Any] = {"role": "assistant", "content": self._says(stamp, request)}
        offered = [tool["function"]["name"] for tool in request.get("tools") or ()]
        known = [name for name in offered if name in self._tools]
        if known and not any(item["role"] == "tool" for item in request["messages"]):
            self.used.append(known[0])
            function = {"name": known[0], "arguments": json.dumps(self._tools[known[0]](stamp))}
            call_id = f"{stamp}{next(self._ids)}"
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return {
            "id": f"chatcmpl-{stamp}{self.calls}",
            "object": "chat.completion",
            "created": 0,
            "model": "stamping",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }


def echo_command(stamp: str) -> str:
    return f"echo {stamp}"


TOOLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "echo": lambda stamp: {"text": stamp},
    "bash": lambda stamp: {"command": echo_command(stamp), "description": "say it"},
    "Bash": lambda stamp: {"command": echo_command(stamp), "description": "say it"},
    "exec_command": lambda stamp: {"cmd": echo_command(stamp)},
    "shell_command": lambda stamp: {"command": echo_command(stamp)},
    "shell": lambda stamp: {"command": ["echo", stamp]},
    "print_story": lambda stamp: {"story": stamp},
}
"""Of the environments above, and of CLI agents: their shells."""
