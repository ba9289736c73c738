"""What tests of `gymgate check` share: an environment of a user's own whose server has faults, and its recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gymgate.check import CheckRequest, CheckResult, check_all

SERVER = """
import os, random, shutil, subprocess, time, urllib.request
from typing import ClassVar
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)
from nemo_gym.config_types import ModelServerRef

class Config(BaseResourcesServerConfig):
    fault: str = "none"
    judge: ModelServerRef | None = None

class Request(BaseVerifyRequest):
    wanted: str

class Server(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: Config

    def setup_webserver(self):
        fault = self.config.fault
        assert os.path.isabs(__file__) and shutil.which("uv")
        if fault == "hang":
            time.sleep(600)
        if fault == "memory":
            self.__dict__["hoard"] = bytearray(b"x") * (3 << 30)
            time.sleep(600)
        if fault == "writes":
            open(os.path.join(os.path.dirname(__file__), "made_at_start.txt"), "w").close()
        if fault == "host":
            urllib.request.urlopen("https://data.invalid/file.zip", timeout=5)
        if fault == "gpu":
            raise RuntimeError("Found no NVIDIA driver on your system.")  # torch.cuda's words
        if fault == "variable":
            self.__dict__["key"] = os.environ["SEARCH_API_KEY"]
        if fault == "binary":
            subprocess.run(["lean4-that-is-not-here"])
        if fault == "bug":
            raise ZeroDivisionError("of our own")
        app = super().setup_webserver()
        app.post("/look_up")(self.look_up)
        return app

    async def look_up(self) -> str:
        return "Paris"

    async def judged(self, text):
        answer = await self.server_client.post(
            server_name=self.config.judge.name,
            url_path="/v1/responses",
            json={"input": [{"role": "user", "content": "Is this right: " + text}]},
        )
        return (await answer.json())["output"][0]["content"][0]["text"]

    async def verify(self, body: Request) -> BaseVerifyResponse:
        fault, text = self.config.fault, body.response.output[-1].content[0].text
        if fault == "judge":
            text = await self.judged(text)
        if fault == "swallows":
            try:
                text = await self.judged(text)
            except Exception:
                text = ""
        if fault == "name":
            text = txt
        reward = float(body.wanted in text)
        if fault == "empty" and not text:
            reward = 1.0
        if fault == "random":
            reward = random.random()
        if fault == "long" and len(text) > 100_000:
            os._exit(3)
        return BaseVerifyResponse(**body.model_dump(), reward=reward)

if __name__ == "__main__":
    Server.run_webserver()
"""
CONFIG = """
own:
  resources_servers:
    own:
      entrypoint: app.py
      domain: other
      verified: false
      description: a server with faults
      value: tests
      fault: none
      judge: {type: responses_api_models, name: a_judge}
own_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: own}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
      - {name: example, type: example, jsonl_fpath: data/example.jsonl, license: one that Gym does not know}
"""


def message(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]


def recorded(question: str, answer: str, reward: float, **fields: Any) -> str:
    params = {"input": [{"role": "user", "content": question}]}
    response = {"id": "resp_1", "output": message(answer)}
    return json.dumps({"responses_create_params": params, "response": response, "reward": reward, **fields})


def home_with(directory: Path, *lines: str) -> Path:
    """A directory with the server above and these recorded lines; the path to its config."""
    home = directory / "resources_servers" / "own"
    (home / "configs").mkdir(parents=True)
    (home / "data").mkdir()
    (home / "app.py").write_text(SERVER)
    (home / "configs" / "own.yaml").write_text(CONFIG)
    rows = [
        {"responses_create_params": {"input": [{"role": "user", "content": question}]}, "wanted": wanted}
        for question, wanted in (("capital of France?", "Paris"), ("of Italy?", "Rome"))
    ]
    (home / "data" / "example.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "data" / "example_rollouts.jsonl").write_text("\n".join(lines))
    return home / "configs" / "own.yaml"


def made_in(directory: Path) -> list[Path]:
    """What a server wrote into its own directory."""
    return list(directory.rglob("made_at_start.txt"))


async def checked(config: Path, fault: str = "none", version: str = "0.7.0", **settings: Any) -> CheckResult:
    overrides = (("own.resources_servers.own.fault", fault),)
    (outcome,) = await check_all(
        [CheckRequest(environment=str(config), version=version, overrides=overrides, **settings)]
    )
    assert isinstance(outcome, CheckResult), outcome
    return outcome


PARIS = recorded("capital of France?", "Paris", 1.0)
