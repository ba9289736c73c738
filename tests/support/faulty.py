"""One environment of a user's own that fails in every way that tests need: at its start, in a tool, while it scores.

Its settings say how, or a rollout's prompt does: `tool:<fault>`, `verify:<fault>`, `run:<fault>` (the last with `failing`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gymgate.core.config import EnvironmentConfig
from support.stacks import ROW, answer

FAILING = """
import asyncio, subprocess, sys, threading, time
from typing import ClassVar
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
            prompt = (await request.json())["responses_create_params"]["input"]
            text = prompt[0].get("content") if isinstance(prompt, list) and prompt else None
            if isinstance(text, str) and text.startswith(word):
                if (bad := await faulty(text.removeprefix(word), request)) is not None:
                    return bad
        return await call_next(request)
"""
SERVER = (
    FAILING
    + """
import os, random, shutil, urllib.request
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)
from nemo_gym.config_types import ModelServerRef

class Config(BaseResourcesServerConfig):
    fault: str = "none"
    tool: str = "none"
    judge: ModelServerRef | None = None
    scores: str = "half"

class VerifyRequest(BaseVerifyRequest):
    wanted: str = ""

class Faulty(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: Config

    def setup_webserver(self):
        fault = self.config.fault
        assert os.path.isabs(__file__) and shutil.which("uv")
        if fault == "die":
            raise RuntimeError("no such luck")
        if fault == "exit":
            sys.exit("no such luck")
        if fault == "bug":
            raise ZeroDivisionError("of our own")
        if fault == "hang":
            time.sleep(600)
        if fault == "once":
            marker = os.path.join(os.path.dirname(__file__), "started")
            if os.path.exists(marker):
                raise RuntimeError("only once")
            open(marker, "w").close()
        if fault == "memory":
            self.__dict__["hoard"] = bytearray(b"x") * (3 << 30)
            time.sleep(600)
        if "writes" in fault:
            open(os.path.join(os.path.dirname(__file__), "made_at_start.txt"), "w").close()
        if fault == "host":
            urllib.request.urlopen("https://data.invalid/file.zip", timeout=5)
        app = super().setup_webserver()
        app.post("/get_weather")(self.get_weather)
        app.post("/look_up")(self.look_up)
        fail_at(app, "/verify", "verify:")
        return app

    async def get_weather(self, request: Request):
        if self.config.tool == "helper":
            return {"helper": subprocess.Popen(["sleep", "600"], start_new_session=True).pid}
        if self.config.tool == "exit":
            os._exit(3)
        city = (await request.json()).get("city", "")
        return await faulty(city.removeprefix("tool:"), request) or {"weather": "cold", "pid": os.getpid()}

    async def look_up(self) -> str:
        return "Paris"

    async def judged(self, text):
        judge = self.config.judge.name if self.config.judge else "judge_model"
        grading = await self.server_client.post(
            server_name=judge, url_path="/v1/responses", json={"input": "Is this right: " + text})
        return grading.status, await grading.json()

    async def verify(self, body: VerifyRequest) -> BaseVerifyResponse:
        score = self.wanted if self.config.scores == "wanted" else self.half
        return BaseVerifyResponse(**{**body.model_dump(), **await score(body)})

    async def half(self, body):
        if self.config.fault == "verify":
            raise ValueError("the answer\\nis not\\nverifiable")
        if self.config.fault == "judge":
            status, _ = await self.judged("cold")
            return {"reward": 1.0} if status == 200 else {
                "reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed"}
        return {"reward": 0.5}

    async def wanted(self, body):
        if not body.wanted:
            raise RequestValidationError(
                [{"type": "missing", "loc": ("body", "wanted"), "msg": "Field required", "input": None}])
        fault, text = self.config.fault, body.response.output[-1].content[0].text
        if fault == "judge" or ("judge" in fault and text == "Lyon"):
            text = (await self.judged(text))[1]["output"][0]["content"][0]["text"]
        if fault == "name":
            text = txt
        reward = random.random() if "random" in fault else float(body.wanted in text)
        if "empty" in fault and not text:
            reward = 1.0
        if "long" in fault and len(text) > 100_000:
            os._exit(3)
        return {"reward": reward}

if __name__ == "__main__":
    Faulty.run_webserver()
"""
)
AGENT = (
    FAILING
    + """
from responses_api_agents.simple_agent.app import SimpleAgent

class FailingAgent(SimpleAgent):
    ray_enabled: ClassVar[bool] = False

    def setup_webserver(self):
        app = super().setup_webserver()
        fail_at(app, "/run", "run:")
        return app

if __name__ == "__main__":
    FailingAgent.run_webserver()
"""
)
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
FAILING_CONFIG = """
failing:
  resources_servers:
    faulty: {entrypoint: app.py, domain: other, verified: false, description: fails as told, value: tests}
failing_agent:
  responses_api_agents:
    failing_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: failing}
      model_server: {type: responses_api_models, name: policy_model}
"""
RECORDED_CONFIG = """
faulty:
  resources_servers:
    faulty:
      entrypoint: app.py
      domain: other
      verified: false
      description: a server with faults
      value: tests
      fault: none
      scores: wanted
      judge: {type: responses_api_models, name: a_judge}
faulty_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: faulty}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
      - {name: example, type: example, jsonl_fpath: data/example.jsonl, license: one that Gym does not know}
"""
FAULTS = ("silence", "garbage", "not an object", "empty", "drip", "reset", "500", "429")
VERIFY_FAULTS = (*FAULTS, "no reward", "NaN")


def written(directory: Path, config: str, name: str = "faulty") -> Path:
    """The path to the config of an environment in `directory`, which is written if it is not there."""
    home = directory / "resources_servers" / name
    path = home / "configs" / f"{name}.yaml"
    if not path.exists():
        path.parent.mkdir(parents=True)
        (home / "app.py").write_text(SERVER)
        path.write_text(config.replace("    faulty:\n", f"    {name}:\n"))
    return path


def faulty(directory: Path, name: str = "faulty", **settings: Any) -> EnvironmentConfig:
    """The environment, which rewards everything with 0.5; `settings` are those of its resources server."""
    path = written(directory, CONFIG, name)
    overrides = tuple((f"faulty.resources_servers.{name}.{key}", value) for key, value in settings.items())
    return EnvironmentConfig(name=str(path), overrides=overrides)


def failing(directory: Path) -> EnvironmentConfig:
    """The same with an agent that fails, too: `failing_agent`."""
    agent = directory / "responses_api_agents" / "failing_agent"
    agent.mkdir(parents=True, exist_ok=True)
    (agent / "app.py").write_text(AGENT)
    return EnvironmentConfig(name=str(written(directory, FAILING_CONFIG)))


def with_recordings(directory: Path, *lines: str) -> Path:
    """The same with two rows and these recorded lines, scored by whether the answer has what is `wanted`; its config."""
    path = written(directory, RECORDED_CONFIG)
    data = path.parents[1] / "data"
    data.mkdir()
    rows = [
        {"responses_create_params": {"input": [{"role": "user", "content": question}]}, "wanted": wanted}
        for question, wanted in (("capital of France?", "Paris"), ("of Italy?", "Rome"))
    ]
    (data / "example.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "example_rollouts.jsonl").write_text("\n".join(lines))
    return path


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
