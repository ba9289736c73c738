"""A verifiers plugin that does nothing but two chat calls per rollout, in process: the framework's own ceiling.

`vf-eval empty-harness` with this directory on PYTHONPATH. One client is shared by all rollouts and speaks no TLS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import aiohttp
import httpx
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult, Runtime

__all__ = ["EmptyEnv", "EmptyHarness", "EmptyTaskset"]

PROMPT = "What is the weather in San Francisco?"
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class EmptyConfig(vf.TasksetConfig):
    """Which client makes the calls."""

    client: Literal["openai", "aiohttp"] = "openai"
    """The official client over one httpx pool, or bare aiohttp."""


class EmptyData(vf.TaskData):
    client: str


class EmptyTask(vf.Task[EmptyData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def always(self) -> float:
        return 1.0


class EmptyTaskset(vf.Taskset[EmptyTask, EmptyConfig]):
    def load(self) -> Iterator[EmptyTask]:
        yield EmptyTask(EmptyData(prompt=PROMPT, client=self.config.client), self.config.task)


class Clients:
    """The shared clients of the one event loop that an eval has."""

    openai: AsyncOpenAI | None = None
    aiohttp: aiohttp.ClientSession | None = None


class EmptyHarnessConfig(vf.HarnessConfig):
    id: str = "empty-harness"


class EmptyHarness(vf.Harness[EmptyHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace[Any],
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        call = _by_openai if isinstance(data, EmptyData) and data.client == "openai" else _by_aiohttp
        messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
        body = {"model": ctx.model, "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
        asked = await call(endpoint, secret, body)
        result = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "cold"}
        await call(endpoint, secret, {**body, "messages": [*messages, asked, result]})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _by_openai(endpoint: str, secret: str, body: dict[str, Any]) -> dict[str, Any]:
    if Clients.openai is None:
        pool = httpx.AsyncClient(verify=False, timeout=None)
        Clients.openai = AsyncOpenAI(base_url=endpoint, api_key="-", max_retries=0, http_client=pool)
    headers = {"Authorization": f"Bearer {secret}"}
    client = Clients.openai.with_options(base_url=endpoint)
    answer = await client.chat.completions.create(**body, extra_headers=headers)
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return message


async def _by_aiohttp(endpoint: str, secret: str, body: dict[str, Any]) -> dict[str, Any]:
    if Clients.aiohttp is None:
        Clients.aiohttp = aiohttp.ClientSession()
    headers = {"Authorization": f"Bearer {secret}"}
    async with Clients.aiohttp.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer:
        message: dict[str, Any] = (await answer.json())["choices"][0]["message"]
        return message


class EmptyEnvConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class EmptyEnv(vf.SingleAgentEnv, vf.Env[EmptyEnvConfig]):
    async def stop(self) -> None:
        if Clients.openai is not None:
            await Clients.openai.close()
        if Clients.aiohttp is not None:
            await Clients.aiohttp.close()
