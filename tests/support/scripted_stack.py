"""What a check uses of a stack, without servers: a policy that is asked once for each row, and a function that scores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from gymgate.core.config import CallableEndpoint, StackConfig
from gymgate.core.errors import GymgateError
from gymgate.quality import CheckRequest, CheckResult
from gymgate.quality.environment import check_environment
from gymgate.rollouts import ModelCall, Rollout
from gymgate.rollouts.result import failed_rollout
from gymgate.stack.client.stack import AgentInfo

Score = Callable[["ScriptedStack", dict[str, Any], str], Awaitable[float | None]]
"""From a row and the policy's last text to the reward; an error fails the rollout."""
AGENT = "faulty_agent"


class ScriptedStack:
    """Runs rollouts in this process."""

    def __init__(self, config: StackConfig, logs: Path, score: Score) -> None:
        [environment] = config.environments
        self.name = environment.name
        self.agents = {AGENT: AgentInfo(self.name, AGENT, "simple_agent")}
        self.config = config
        self.logs = logs
        self._score = score
        self._callables: dict[str, Any] = {}
        self._calls: list[ModelCall] = []

    def register(self, name: str, policy: Any, *, dialect: Any = "chat") -> CallableEndpoint:
        self._callables[name] = policy
        return CallableEndpoint(name=name, dialect=dialect)

    def unregister(self, name: str) -> None:
        del self._callables[name]

    async def status(self) -> dict[str, Any]:
        return {"environments": {self.name: {"logs": str(self.logs), "servers": {}}}}

    async def ask_judge(self, text: str) -> str:
        """What the stack's judge says; its endpoint is asked over HTTP, as every judge is."""
        models: dict[str, Any] = dict(self.config.models)
        endpoint = models.get("a_judge", models["*"])
        body = {"input": [{"role": "user", "content": text}]}
        self._calls.append(ModelCall(index=len(self._calls), model_server="a_judge", dialect="responses"))
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(f"{endpoint.base_url}/responses", json=body) as response,
        ):
            answer = await response.json()
        return str(answer["output"][0]["content"][0]["text"])

    async def run(self, row: dict[str, Any], *, policy: Any, agent: str | None, **settings: Any) -> Rollout:
        self._calls = [ModelCall(index=0, dialect="responses")]
        about = {"id": "r", "environment": self.name, "agent": agent or AGENT}
        prompt = row["responses_create_params"]["input"]
        try:
            if isinstance(policy, CallableEndpoint):
                answer = await self._callables[policy.name]({"model": "m", "input": prompt})
                content = answer["output"][-1]["content"]
                text = content if isinstance(content, str) else content[0]["text"]
            else:
                answer = await policy({"model": "m", "messages": prompt})
                text = answer["choices"][0]["message"]["content"]
            reward = await self._score(self, row, text)
        except GymgateError as error:
            return failed_rollout(error, **about).model_copy(update={"calls": self._calls})
        status: Any = "truncated" if answer.get("status") == "incomplete" else "completed"
        return Rollout(**about, status=status, reward=reward, calls=self._calls)


async def wanted(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
    """As the faulty environment scores."""
    return float(row["wanted"] in text)


async def check_on(
    monkeypatch: pytest.MonkeyPatch,
    config: Path,
    score: Score = wanted,
    /,
    *,
    failures: tuple[GymgateError, ...] = (),
    **settings: Any,
) -> tuple[CheckResult, list[StackConfig]]:
    """Check the environment of this config on scripted stacks, the first of which do not start; and the stacks' configs."""
    configs: list[StackConfig] = []
    site = config.parents[3] / "site"
    for name in ("site", "logs"):
        site.with_name(name).mkdir(exist_ok=True)

    @asynccontextmanager
    async def acquire(config: StackConfig) -> AsyncIterator[ScriptedStack]:
        configs.append(config)
        if len(configs) <= len(failures):
            raise failures[len(configs) - 1]
        yield ScriptedStack(config, site.with_name("logs"), score)

    def ensure_runtime(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(site=site, version="0.7.0", python=Path("/no/python"))

    monkeypatch.setattr("gymgate.quality.replay.LATE_LOG_S", 0.0)  # nothing is logged late here
    monkeypatch.setattr("gymgate.quality.environment.acquire", acquire)
    monkeypatch.setattr("gymgate.quality.environment.ensure_runtime", ensure_runtime)
    request = CheckRequest.model_validate({"environments": str(config), **settings})
    return await check_environment(request), configs
