"""Environments of a user's own whose episodes an environment server of NeMo Gym's base class owns: a user and an assistant talk
in turns, the assistant with a tool, and a row's field `fail` says what goes wrong.

`duet`: the user has a model server of its own. `duet_same`: both have the policy's. `duet_tight`: one episode at a time, for 2 s.
All three servers of an environment show at `/open` how many sessions are open at them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from gymgate import Stack
from support.stacks import answer

ENVIRONMENT_SERVER = """
import asyncio, os
from typing import Any, ClassVar
from uuid import uuid4
from fastapi import Body
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from nemo_gym.base_environment_server import BaseEnvironmentServer, BaseEnvironmentServerConfig, HandledEpisodeError
from nemo_gym.base_resources_server import BaseVerifyResponse, ResourcesCloseSessionRequest, ResourcesSeedSessionRequest
from nemo_gym.base_responses_api_agent import AgentCloseSessionRequest, AgentSeedSessionRequest
from nemo_gym.config_types import AgentServerRef, AggregateMetrics, AggregateMetricsRequest, ResourcesServerRef
from nemo_gym.episode_types import BaseEpisodeRequest, BaseEpisodeResponse, EpisodeFailure
from nemo_gym.server_utils import get_response_json, raise_for_status
from nemo_gym.tool_access import DirectHTTPToolAccess

class Config(BaseEnvironmentServerConfig):
    resources_server: ResourcesServerRef
    user_agent: AgentServerRef
    assistant_agent: AgentServerRef
    agent_server: AgentServerRef | None = None

class Task(BaseModel):
    model_config = ConfigDict(extra="allow")
    responses_create_params: dict[str, Any]
    turns: int = 2
    stamp: str = ""
    fail: str = ""

class Result(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")

class Failure(EpisodeFailure):
    partial_response: dict[str, Any] | None = None

class Request(BaseEpisodeRequest[Task]):
    pass

class Response(BaseEpisodeResponse[Result]):
    failure: Failure | None = None

def cookies_of(response):
    return {str(name): str(morsel.value) for name, morsel in response.cookies.items()}

class Duet(BaseEnvironmentServer[Request, Response]):
    ray_enabled: ClassVar[bool] = False
    config: Config
    request_model = Request
    response_model = Response

    async def run_request(self, request):
        fail = request.task.task_input.fail
        plain = {"episode_id": request.episode_id.model_dump(), "task_id": request.task.task_id.model_dump()}
        if fail == "wrong episode":
            return JSONResponse({**plain, "episode_id": {"rollout_id": "another", "attempt": 0}, "result": {"reward": 1.0}})
        if fail == "both":
            failure = {"failure_reason": "on purpose", "terminal": False}
            return JSONResponse({**plain, "result": {"reward": 1.0}, "failure": failure})
        if fail == "neither":
            return JSONResponse({**plain, "result": None, "failure": None})
        if fail == "no reward":
            return JSONResponse({**plain, "result": {"reward": None, "response": {"output": []}}})
        return await super().run_request(request)

    async def post(self, server, path, body, cookies=None):
        response = await self.server_client.post(server_name=server.name, url_path=path, json=body, cookies=cookies or {})
        await raise_for_status(response)
        return response

    def failed(self, stage, error, **fields):
        return HandledEpisodeError(Failure(stage=stage, failure_reason=str(error)[:2000], terminal=False, **fields))

    async def run(self, request, cleanup):
        task, episode = request.task.task_input, request.episode_id
        if task.fail == "unhandled":
            raise RuntimeError("on purpose")
        if task.fail == "crash":
            os._exit(3)
        session, resources = f"resources-{uuid4().hex}", {}

        async def close_resources():
            body = ResourcesCloseSessionRequest(resources_session_id=session, episode_id=episode)
            await self.post(self.config.resources_server, "/close_session", body.model_dump(mode="json"), resources)

        resources_cleanup = cleanup.register_cleanup("resources", close_resources)
        seed = ResourcesSeedSessionRequest(
            resources_session_id=session, episode_id=episode, task_id=request.task.task_id, task_data={"fail": task.fail})
        try:
            seeded = await self.post(self.config.resources_server, "/seed_session", seed.model_dump(mode="json"))
        except Exception as error:
            raise self.failed("seed", error) from error
        resources = cookies_of(seeded)
        tools = DirectHTTPToolAccess(
            name="tools", required=True, cookies=resources,
            base_url=self.server_client._resolve_base_url(self.config.resources_server.name).rstrip("/"))
        user = await self.open(self.config.user_agent, request, cleanup, [])
        assistant = await self.open(self.config.assistant_agent, request, cleanup, [tools])
        if task.fail == "timeout":
            await asyncio.sleep(600)
        said, reply = [], None
        for turn in range(task.turns):
            prompt = f"turn {turn} of {task.stamp}: " + " / ".join(said)
            heard = await self.activate(user, request, {"input": [{"role": "user", "content": prompt}]})
            said.append(heard["output"][-1]["content"][0]["text"])
            asked = {**task.responses_create_params, "input": [{"role": "user", "content": text} for text in said]}
            if task.fail == "agent":
                asked["input"] = 5
            reply = await self.activate(assistant, request, asked)
            said.append(reply["output"][-1]["content"][0]["text"])
        for agent in (user, assistant):
            await agent["cleanup"].close()
        if task.fail.startswith("judge"):
            raise self.failed("verification", "the judge said nothing", failure_kind=task.fail)
        if task.fail == "terminal":
            raise HandledEpisodeError(
                Failure(stage="agent", failure_reason="never again", terminal=True, partial_response=reply))
        verify = task.model_dump() | {"response": reply, "said": said}
        try:
            verified = await self.post(self.config.resources_server, "/verify", verify, assistant["tools"] or resources)
        except Exception as error:
            raise self.failed("verification", error, partial_response=reply) from error
        if task.fail == "cleanup":
            try:
                await resources_cleanup.close()
            except Exception as error:
                raise self.failed("cleanup", error, partial_response=reply) from error
        return Response(episode_id=episode, task_id=request.task.task_id, result=await get_response_json(verified))

    async def open(self, agent, request, cleanup, tools):
        session, opened = f"agent-{uuid4().hex}", {"agent": agent, "cookies": {}, "tools": {}}

        async def close():
            body = AgentCloseSessionRequest(agent_session_id=session, episode_id=request.episode_id)
            closed = await self.post(agent, "/v1/agent_sessions/close", body.model_dump(mode="json"), opened["cookies"])
            opened["tools"] = (await get_response_json(closed)).get("resources_cookies") or {}

        opened["cleanup"] = cleanup.register_cleanup(agent.name, close)
        body = AgentSeedSessionRequest(
            agent_session_id=session, episode_id=request.episode_id, task_id=request.task.task_id, tool_accesses=tools)
        opened["cookies"] = cookies_of(await self.post(agent, "/v1/agent_sessions", body.model_dump(mode="json")))
        return opened

    async def activate(self, opened, request, body):
        path = f"/ng-rollout/{request.episode_id.capture_key}/v1/responses"
        try:
            response = await self.post(opened["agent"], path, body, opened["cookies"])
        except Exception as error:
            raise self.failed("agent", error) from error
        opened["cookies"] |= cookies_of(response)
        return await get_response_json(response)

    async def aggregate_metrics(self, body: AggregateMetricsRequest = Body()) -> AggregateMetrics:
        raise NotImplementedError

if __name__ == "__main__":
    Duet.run_webserver()
"""
RESOURCES_SERVER = """
from typing import ClassVar
from fastapi import HTTPException, Request
from pydantic import ConfigDict
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, ResourcesCloseSessionRequest,
    ResourcesCloseSessionResponse, ResourcesSeedSessionRequest, ResourcesSeedSessionResponse, SimpleResourcesServer)
from nemo_gym.server_utils import SESSION_ID_KEY

class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")
    stamp: str = ""
    fail: str = ""

class VerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")

class Duet(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: BaseResourcesServerConfig

    def model_post_init(self, context):
        super().model_post_init(context)
        self.__dict__["sessions"], self.__dict__["closed"] = {}, set()

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/note")(self.note)
        app.get("/open")(self.open)
        return app

    async def open(self):
        return {"open": len(self.sessions), "closed": len(self.closed)}

    async def seed_session(self, request: Request, body: ResourcesSeedSessionRequest) -> ResourcesSeedSessionResponse:
        if body.resources_session_id in self.closed:
            raise HTTPException(409, "closed")
        if body.task_data.get("fail") == "seed":
            raise RuntimeError("no seed, on purpose")
        request.session[SESSION_ID_KEY] = body.resources_session_id
        self.sessions.setdefault(body.resources_session_id, {"notes": [], "fail": body.task_data.get("fail")})
        return ResourcesSeedSessionResponse(resources_session_id=body.resources_session_id)

    async def close_resources_session(self, body: ResourcesCloseSessionRequest) -> ResourcesCloseSessionResponse:
        session = self.sessions.get(body.resources_session_id)
        if session is not None and session["fail"] == "cleanup":
            session["fail"] = None
            raise RuntimeError("not closed, on purpose")
        self.sessions.pop(body.resources_session_id, None)
        self.closed.add(body.resources_session_id)
        return ResourcesCloseSessionResponse(resources_session_id=body.resources_session_id)

    async def note(self, request: Request) -> str:
        self.sessions[request.session[SESSION_ID_KEY]]["notes"].append((await request.json())["text"])
        return "noted"

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        if body.fail == "verification":
            raise RuntimeError("no verdict, on purpose")
        notes = self.sessions[request.session[SESSION_ID_KEY]]["notes"]
        right = notes == [body.stamp] and body.stamp in body.response.output[-1].content[0].text
        return VerifyResponse(**body.model_dump(), reward=float(right), notes=notes)

if __name__ == "__main__":
    Duet.run_webserver()
"""
AGENT = """
from typing import ClassVar
from responses_api_agents.simple_agent.app import SimpleAgent

class Agent(SimpleAgent):
    ray_enabled: ClassVar[bool] = False

    def setup_webserver(self):
        app = super().setup_webserver()
        app.get("/open")(self.open)
        return app

    async def open(self):
        return {"open": sum(record.state is not None for record in self._session_records.values())}

if __name__ == "__main__":
    Agent.run_webserver()
"""
CONFIG = """
environment_server_routes: {"%(name)s:tests": %(name)s}
%(name)s:
  environment_servers:
    duet:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: %(name)s_resources}
      user_agent: {type: responses_api_agents, name: %(name)s_user}
      assistant_agent: {type: responses_api_agents, name: %(name)s_assistant}
      cleanup_timeout_seconds: 180%(more)s
%(name)s_resources:
  resources_servers:
    duet: {entrypoint: app.py, domain: other, verified: false, description: a user and an assistant, value: tests}
%(name)s_user:
  responses_api_agents:
    duet_agent:
      entrypoint: app.py
      model_server: {type: responses_api_models, name: %(user_model)s}
      execute_tools: false
%(name)s_assistant:
  responses_api_agents:
    duet_agent:
      entrypoint: app.py
      model_server: {type: responses_api_models, name: policy_model}
"""
TIGHT = "\n      max_concurrent_episodes: 1\n      queue_timeout_seconds: 0.2\n      default_episode_timeout_seconds: 2"
CONFIGS = {
    "duet": {"user_model": "user_model", "more": ""},
    "duet_same": {"user_model": "policy_model", "more": ""},
    "duet_tight": {"user_model": "user_model", "more": TIGHT},
}
SERVERS = ("resources", "user", "assistant")


def episodes(directory: Path, name: str = "duet") -> Path:
    """The config of one of the environments, in a tree of components that is written if it is not there."""
    code = {
        "environment_servers/duet/app.py": ENVIRONMENT_SERVER,
        "resources_servers/duet/app.py": RESOURCES_SERVER,
        "responses_api_agents/duet_agent/app.py": AGENT,
    }
    config = CONFIG % {"name": name, **CONFIGS[name]}
    for path, text in {**code, f"resources_servers/duet/configs/{name}.yaml": config}.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return directory / "resources_servers" / "duet" / "configs" / f"{name}.yaml"


NOTE = {
    "type": "function",
    "name": "note",
    "description": "",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "strict": False,
}


def episode_row(stamp: str = "s", **fields: Any) -> dict[str, Any]:
    """A row: an assistant that notes the stamp, and says it at the end, is right."""
    params = {"input": [{"role": "user", "content": "begin"}], "tools": [NOTE]}
    return {"responses_create_params": params, "stamp": stamp, **fields}


def assistant(stamp: str = "s") -> Any:
    """A Responses policy that notes the stamp once, and says it."""

    def say(body: Mapping[str, Any]) -> dict[str, Any]:
        items = body["input"]
        if len(items) == 1 and isinstance(items[0], dict) and items[0].get("role") == "user":
            called = answer(call="note")
            called["output"][0]["arguments"] = f'{{"text": "{stamp}"}}'
            return called
        return answer(text=f"assistant {stamp}")

    return say


def user(body: Mapping[str, Any]) -> dict[str, Any]:
    """A Responses model for the user: says the number of the turn and the stamp that it was asked with."""
    content = body["input"][0]["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    asked = re.match(r"turn (\d+) of (\S*):", text)
    assert asked is not None, text
    return answer(text=f"user {asked[1]} {asked[2]}")


def both(stamp: str = "s") -> Any:
    """A Responses policy that plays the assistant and the user."""
    say = assistant(stamp)
    return lambda body: say(body) if body.get("tools") else user(body)


async def open_sessions(stack: Stack, environment: str, name: str = "duet") -> dict[str, int]:
    """How many sessions are open at each of an environment's servers."""
    servers = (await stack.status())["environments"][environment]["servers"]
    counts = {}
    async with aiohttp.ClientSession() as client:
        for server in SERVERS:
            url = f"http://127.0.0.1:{servers[f'{name}_{server}']['port']}/open"
            async with client.get(url, timeout=aiohttp.ClientTimeout(10)) as response:
                counts[server] = (await response.json())["open"]
    return counts


async def none_open(stack: Stack, environment: str, name: str = "duet", seconds: float = 20.0) -> bool:
    """Whether no session is open within so many seconds: a server closes those of a cancelled episode after it was left."""
    deadline = time.monotonic() + seconds
    while any((counts := await open_sessions(stack, environment, name)).values()):
        if time.monotonic() > deadline:
            print("open:", counts)
            return False
        await asyncio.sleep(0.05)
    return True
