"""Every supported release of NeMo Gym: a rollout by each way of routing that it offers, and no call that goes astray."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_agents_remote import service

from gymgate.core.config import SUPPORTED_NEMO_GYM, EnvironmentConfig, Routing, RuntimeConfig
from gymgate.gym.inside import names
from gymgate.gym.runtime import Runtime, clean_env, ensure_runtime
from gymgate.stack import acquire
from support.agents import (
    ECHO,
    TOOLS,
    StampingPolicy,
    environment_with,
    environment_with_forgetful_agent,
    stamped_row,
)
from support.stacks import ROW, SIMPLE, call_then_answer, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(600)]

AGENT = """
from typing import ClassVar
import aiohttp
from fastapi import Request
from pydantic import ConfigDict
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef

class Config(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef

class LenientRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")

class Response(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")

class Own(SimpleResponsesAPIAgent):
    ray_enabled: ClassVar[bool] = False
    config: Config

    async def responses(self, body: dict) -> dict:
        raise NotImplementedError

    async def run(self, request: Request, body: LenientRequest) -> Response:
        row = await request.json()
        %(ask)s
        row["response"] = await answer.json()
        verified = await self.server_client.post(
            server_name=self.config.resources_server.name, url_path="/verify", json=row)
        return Response.model_validate(await verified.json())

if __name__ == "__main__":
    Own.run_webserver()
"""
BY_CLIENT = """answer = await self.server_client.post(
            server_name=self.config.model_server.name, url_path="/v1/responses", json=row["responses_create_params"])"""
BY_BODY = """async with aiohttp.ClientSession() as session:
            answer = await session.post(body.policy_base_url + "/responses", json=row["responses_create_params"])
            await answer.read()"""
BY_ITSELF = """from nemo_gym.server_utils import get_first_server_config_dict
        model = get_first_server_config_dict(self.server_client.global_config_dict, self.config.model_server.name)
        async with aiohttp.ClientSession() as session:
            url = f"http://{model.host}:{model.port}/v1/responses"
            answer = await session.post(url, json=row["responses_create_params"])
            await answer.read()
            answer.status == 200 or 1 / 0"""


def environment_with_own_agent(directory: Path, ask: str) -> str:
    home = directory / "responses_api_agents" / "own_agent"
    home.mkdir(parents=True)
    (home / "app.py").write_text(AGENT % {"ask": ask})
    return environment_with(directory, "own_agent")


FINANCE = {"max_steps": 1, "no_tool_call_nudge": "", "max_time_seconds": 60, "abort_on_tool_error_types": []}
"""What its config must have from 0.6 on."""
CASES: dict[str, tuple[Callable[[Path], str], Routing | None, str]] = {
    "helpers": (lambda path: environment_with(path, "simple_agent"), None, "url"),
    "metadata": (lambda path: environment_with(path, "finance_agent", **FINANCE), None, "metadata"),
    "body": (lambda path: environment_with_own_agent(path, BY_BODY), "body", "body"),
    "client": (lambda path: environment_with_own_agent(path, BY_CLIENT), None, "url"),
    "dropped": (lambda path: environment_with_own_agent(path, BY_ITSELF), "process", "process"),
    "own URL": (environment_with_forgetful_agent, None, "process"),
}
"""How an environment is made, the routing that it is given, and the routing of its agent."""


def strategies_of(status: dict[str, Any]) -> dict[str, str]:
    (place,) = status["environments"].values()
    found: dict[str, str] = place["strategies"]
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", SUPPORTED_NEMO_GYM)
async def test_each_way_of_routing(version: str, name: str, tmp_path: Path) -> None:
    """Four rollouts at once: each asks its own policy only, and its own answer is verified with its own row."""
    make, routing, expected = CASES[name]
    policies = [StampingPolicy(number, TOOLS) for number in range(1, 5)]
    fields = {"_ng_task_index": 7, "_ng_rollout_index": 3}
    environment = EnvironmentConfig(name=make(tmp_path), routing=routing)
    async with acquire(stack_config(environment, version=version, agent_processes=2)) as stack:
        assert strategies_of(await stack.status()) == {"agent": expected}
        rows = [stamped_row(each.number, **fields) for each in policies]
        if name == "helpers":
            for row in rows:
                row["responses_create_params"]["tools"] = [ECHO]
        rollouts = await asyncio.gather(
            *(stack.run(row, policy=each) for row, each in zip(rows, policies, strict=True))
        )
    for rollout, policy in zip(rollouts, policies, strict=True):
        assert (rollout.error, rollout.reward, policy.seen) == (None, 1.0, {policy.number})
        assert rollout.result is not None
        kept = {key: value for key, value in rollout.result.items() if key in fields}
        assert kept.items() <= fields.items(), "the row's own or none"


@pytest.mark.heavy
@pytest.mark.parametrize("version", SUPPORTED_NEMO_GYM)
async def test_a_remote_service(version: str, tmp_path: Path) -> None:
    async with service() as url:
        path = environment_with(tmp_path, "remote_agent", agent_base_url=url, model_server=None)
        async with acquire(stack_config(path, version=version)) as stack:
            assert strategies_of(await stack.status()) == {"agent": "remote"}
            policy = StampingPolicy(1, TOOLS)
            rollout = await stack.run(stamped_row(1), policy=policy)
    assert (rollout.error, rollout.reward, policy.calls) == (None, 1.0, 2)


async def test_an_agent_that_drops_its_key_is_told_of_the_setting(tmp_path: Path) -> None:
    """Its own error says nothing of the refusal. With the setting, its rollouts are scored."""
    path = environment_with_own_agent(tmp_path, BY_ITSELF)
    async with acquire(stack_config(path)) as stack:
        rollout = await stack.run(stamped_row(1), policy=StampingPolicy(1, TOOLS))
    assert rollout.error is not None
    assert rollout.error.kind == "environment"
    assert "--routing process" in rollout.error.message
    environment = EnvironmentConfig(name=path, routing="process")
    async with acquire(stack_config(environment, agent_processes=1)) as stack:
        assert strategies_of(await stack.status()) == {"agent": "process"}
        assert (await stack.run(stamped_row(1), policy=StampingPolicy(1, TOOLS))).reward == 1.0


async def test_an_unknown_release_is_tried_with_one_line_of_warning(tmp_path: Path) -> None:
    """Here the default release under another number."""
    runtime = await asyncio.to_thread(ensure_runtime, RuntimeConfig())
    lines: list[str] = []
    config = stack_config(SIMPLE).model_copy(
        update={"runtime": RuntimeConfig(interpreter=str(renumbered(runtime, tmp_path, "0.99.0")))}
    )
    async with acquire(config, progress=lines.append) as stack:
        assert strategies_of(await stack.status()) == {f"{SIMPLE}_simple_agent": "url"}
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        assert (await stack.run(ROW, policy=policy)).reward == 1.0
    warnings = [line for line in lines if line.startswith("warning: ")]
    (warning,) = warnings
    assert "nemo-gym 0.99.0" in warning
    assert "0.7.0 and 0.6.0" in warning


def renumbered(runtime: Runtime, directory: Path, version: str) -> Path:
    """The interpreter of a virtual environment that holds a runtime's packages, nemo-gym under another version."""
    home = directory / "renumbered"
    subprocess.run([runtime.python, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    site = home / "lib" / runtime.site.parent.name / "site-packages"
    (site / "runtime.pth").write_text(f"{runtime.site}\n")
    about = site / f"nemo_gym-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nemo-gym\nVersion: {version}\n")
    return home / "bin" / "python"


@pytest.mark.parametrize("version", SUPPORTED_NEMO_GYM)
def test_a_release_has_every_name_that_our_code_uses(version: str, tmp_path: Path) -> None:
    python = ensure_runtime(RuntimeConfig(version=version)).python
    command = [python, "-I", names.__file__]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=clean_env()
    )
    assert (done.returncode, done.stderr) == (0, "")
