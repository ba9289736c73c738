"""A judge that dies, and a resources server that asks it in each of the ways that packaged servers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from gymgate.core.config import HTTPEndpoint
from support.upstream import Seen, Upstream, chat_answer, drop, upstream

Death = Literal["answers 500", "hangs up", "refuses"]

SERVER = """
import asyncio
from contextvars import Context
from typing import ClassVar
from openai import OpenAI
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)
from nemo_gym.config_types import ModelServerRef
from nemo_gym.judge import call_judge
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI, NeMoGymResponse
from nemo_gym.server_utils import get_response_json, get_server_url, raise_for_status

class Config(BaseResourcesServerConfig):
    judge: ModelServerRef
    judge_base_url: str = ""

class Request(BaseVerifyRequest):
    way: str = "post"

class Judged(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: Config

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/get_weather")(self.get_weather)
        return app

    async def get_weather(self, body: dict) -> dict:
        await self.post(str(body))
        return {}

    async def post(self, text: str) -> str:
        response = await self.server_client.post(
            server_name=self.config.judge.name, url_path="/v1/responses", json={"input": text})
        await raise_for_status(response)
        return self.said(NeMoGymResponse.model_validate(await get_response_json(response)))

    def said(self, response: NeMoGymResponse) -> str:
        return response.output[0].content[0].text

    def chat(self, text: str) -> dict:
        return {"model": "judge", "messages": [{"role": "user", "content": text}]}

    async def raising(self, text: str) -> str:
        return await self.post(text)

    async def again(self, text: str) -> str:
        try:
            return await self.post(text)
        except Exception:
            return await self.post(text)

    async def call_judge(self, text: str) -> str:
        return self.said(await call_judge(
            self.server_client, server_name=self.config.judge.name, url_path="/v1/responses",
            json={"input": text}, response_model=NeMoGymResponse))

    async def timeout(self, text: str) -> str:
        async with asyncio.timeout(1):
            return await self.post(text)

    async def task(self, text: str) -> str:
        return await asyncio.create_task(self.post(text))

    async def empty_context(self, text: str) -> str:
        return await asyncio.create_task(self.post(text), context=Context())

    async def client(self, text: str) -> str:
        url = get_server_url(self.config.judge.name) + "/v1"
        answer = await NeMoGymAsyncOpenAI(base_url=url, api_key="none").create_chat_completion(**self.chat(text))
        return answer["choices"][0]["message"]["content"]

    async def address(self, text: str) -> str:
        client = NeMoGymAsyncOpenAI(base_url=self.config.judge_base_url, api_key="none")
        return (await client.create_chat_completion(**self.chat(text)))["choices"][0]["message"]["content"]

    async def thread(self, text: str) -> str:
        url = get_server_url(self.config.judge.name) + "/v1"
        client = OpenAI(base_url=url, api_key="none")
        answer = await asyncio.to_thread(lambda: client.chat.completions.create(**self.chat(text)))
        return answer.choices[0].message.content

    async def verify(self, body: Request) -> BaseVerifyResponse:
        text = body.response.output[-1].content[0].text
        reward = 0.25
        if body.way in ("raising", "call_judge"):
            reward = float(await getattr(self, body.way)(text) == "right")
        elif body.way != "none":
            try:
                reward = float(await getattr(self, body.way)(text) == "right")
            except Exception:
                reward = 0.0
        return BaseVerifyResponse(**body.model_dump(), reward=reward)

if __name__ == "__main__":
    Judged.run_webserver()
"""
CONFIG = """
judged:
  resources_servers:
    judged:
      entrypoint: app.py
      domain: other
      verified: false
      description: a server that asks a judge
      value: tests
      judge: {type: responses_api_models, name: judge_model}
      judge_base_url: ${judge_base_url}
judge_model:
  responses_api_models:
    openai_model:
      entrypoint: app.py
      openai_base_url: ???
      openai_api_key: ???
      openai_model: ???
other_model:
  responses_api_models:
    openai_model: {entrypoint: app.py, openai_base_url: "${judge_base_url}", openai_api_key: x, openai_model: x}
judged_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: judged}
      model_server: {type: responses_api_models, name: policy_model}
"""


def judged(directory: Path) -> str:
    """The path to the config of an environment whose rows say in which `way` their judge is asked."""
    home = directory / "resources_servers" / "judged"
    (home / "configs").mkdir(parents=True)
    (home / "app.py").write_text(SERVER)
    path = home / "configs" / "judged.yaml"
    path.write_text(CONFIG)
    return str(path)


def row(way: str, text: str = "hello") -> dict[str, Any]:
    return {"way": way, "responses_create_params": {"input": [{"role": "user", "content": text}]}}


def saying(text: str) -> Any:
    """A policy that says one thing."""

    async def policy(request: dict[str, Any]) -> dict[str, Any]:
        return chat_answer(text)

    return policy


class MortalJudge:
    """Says `said` to the first `lives` questions, then dies as `death` says; `revive` brings it back."""

    def __init__(self, lives: int = 1 << 30, death: Death = "answers 500", said: str = "right") -> None:
        self.lives, self.death, self.said = lives, death, said
        self.answered: list[str] = []
        """Questions that got an answer."""
        self.failed: list[str] = []
        """Questions that got none."""
        self.asked = 0
        self.held: asyncio.Event | None = None
        """Set: questions wait for it before they are looked at."""
        self.waiting = 0
        self.arrived = asyncio.Event()
        self._serving: Upstream | None = None

    async def waits(self, count: int) -> None:
        """Until so many questions are held."""
        while self.waiting < count:
            self.arrived.clear()
            await self.arrived.wait()

    async def answer(self, seen: Seen) -> web.StreamResponse:
        question = seen.raw.decode()
        self.asked += 1
        if self.held is not None:
            self.waiting += 1
            self.arrived.set()
            await self.held.wait()
        if len(self.answered) < self.lives:
            self.answered.append(question)
            return web.json_response(chat_answer(self.said))
        self.failed.append(question)
        if self.death == "answers 500":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        if self.death == "refuses" and self._serving is not None and self._serving.listener is not None:
            self._serving.listener.close()
        return await drop(seen)

    def has_answered(self, text: str) -> bool:
        return any(text in question for question in self.answered)

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[None]:
        async with upstream(self.answer, port) as self._serving:
            yield


def endpoint(port: int) -> HTTPEndpoint:
    return HTTPEndpoint(base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
