"""An environment whose servers fail as a rollout says in its prompt: `tool:<fault>`, `verify:<fault>`, `run:<fault>`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gymgate.config import EnvironmentConfig
from support.stacks import ROW, answer

FAILING = """
import asyncio, subprocess, sys, threading, time
from fastapi import Request
from starlette.responses import Response, StreamingResponse

COMPUTE = "import time\\nend = time.monotonic() + 4\\nwhile time.monotonic() < end: pass"

async def drip(request):
    yield b'{'
    for _ in range(3000):
        await asyncio.sleep(0.2)
        if await request.is_disconnected():
            return
        yield b' '

async def cut():
    yield b'{"half": '
    await asyncio.sleep(0.05)
    raise ConnectionResetError("on purpose")

async def faulty(fault, request):
    if fault == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if fault == "compute":
        exec(COMPUTE)
    if fault == "let compute":
        subprocess.run([sys.executable, "-c", COMPUTE])
    if fault == "wait":
        time.sleep(1)
    if fault == "silence":
        await asyncio.sleep(600)
    if fault == "garbage":
        return Response(b"\\x00\\xff<html>" * 100, media_type="application/json")
    if fault == "not an object":
        return Response(b"[1, 2]", media_type="application/json")
    if fault == "empty":
        return Response(b"", media_type="application/json")
    if fault == "drip":
        return StreamingResponse(drip(request), media_type="application/json")
    if fault == "reset":
        return StreamingResponse(cut(), media_type="application/json")
    if fault == "500":
        return Response(b"on purpose", status_code=500)
    if fault == "429":
        return Response(b"slow down", status_code=429, headers={"Retry-After": "3600"})
    if fault == "no reward":
        return Response(b'{"reward": null}', media_type="application/json")
    if fault == "NaN":
        return Response(b'{"reward": NaN}', media_type="application/json")
    return None

def fail_at(app, path, word):
    @app.middleware("http")
    async def fail(request, call_next):
        if request.url.path.endswith(path):
            text = (await request.json())["responses_create_params"]["input"][0]["content"]
            if text.startswith(word) and (bad := await faulty(text.removeprefix(word), request)) is not None:
                return bad
        return await call_next(request)
"""
SERVER = (
    FAILING
    + """
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer

class Faulty(SimpleResourcesServer):
    ray_enabled = False

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/get_weather")(self.get_weather)
        fail_at(app, "/verify", "verify:")
        return app

    async def get_weather(self, request: Request):
        city = (await request.json())["city"]
        return await faulty(city.removeprefix("tool:"), request) or {"weather": "cold"}

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=0.5)

if __name__ == "__main__":
    Faulty.run_webserver()
"""
)
AGENT = (
    FAILING
    + """
from responses_api_agents.simple_agent.app import SimpleAgent

class FailingAgent(SimpleAgent):
    ray_enabled = False

    def setup_webserver(self):
        app = super().setup_webserver()
        fail_at(app, "/run", "run:")
        return app

if __name__ == "__main__":
    FailingAgent.run_webserver()
"""
)
CONFIG = """
failing:
  resources_servers:
    failing: {entrypoint: app.py, domain: other, verified: false, description: fails as told, value: tests}
failing_agent:
  responses_api_agents:
    failing_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: failing}
      model_server: {type: responses_api_models, name: policy_model}
"""
FAULTS = ("silence", "garbage", "not an object", "empty", "drip", "reset", "500", "429")
VERIFY_FAULTS = (*FAULTS, "no reward", "NaN")


def failing(directory: Path) -> EnvironmentConfig:
    """The environment; its agent is `failing_agent`, and 0.5 its reward."""
    home = directory / "resources_servers" / "failing"
    (home / "configs").mkdir(parents=True, exist_ok=True)
    (home / "app.py").write_text(SERVER)
    (home / "configs" / "failing.yaml").write_text(CONFIG)
    agent = directory / "responses_api_agents" / "failing_agent"
    agent.mkdir(parents=True, exist_ok=True)
    (agent / "app.py").write_text(AGENT)
    return EnvironmentConfig(name=str(home / "configs" / "failing.yaml"))


def row(prompt: str) -> dict[str, Any]:
    """A row of that prompt."""
    params = {**ROW["responses_create_params"], "input": [{"role": "user", "content": prompt}]}
    return {"responses_create_params": params}


def obedient(body: dict[str, Any]) -> dict[str, Any]:
    """A Responses policy: asks the weather of the place that the prompt is, then answers."""
    items = body["input"]
    if any(item.get("type") == "function_call_output" for item in items):
        return answer()
    called = answer(call="get_weather")
    prompt = items[0]["content"]
    text = prompt if isinstance(prompt, str) else prompt[0]["text"]
    called["output"][0]["arguments"] = f'{{"city": "{text}"}}'
    return called
