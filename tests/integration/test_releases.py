"""Every supported release of NeMo Gym: a rollout by each way of routing that it offers, and no call that goes astray."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents_support import (
    ECHO,
    TOOLS,
    StampingPolicy,
    environment_with,
    environment_with_forgetful_agent,
    stamped_row,
)
from stack_support import ROW, SIMPLE, call_then_answer, stack_config
from test_agents_remote import service

from gymgate.catalog.agentcode import read_agent
from gymgate.config import SUPPORTED_NEMO_GYM, RuntimeConfig
from gymgate.runtime import Runtime, ensure_runtime
from gymgate.stack import acquire, forkserver, gym_config
from gymgate.stack.routing import KeyForwarding, strategy_for

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600)]

OLD = ("0.3.0", "0.3.1", "0.4.0")
"""Releases that put no key into a URL."""
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

    async def run(self, request: Request, body: %(body)s) -> Response:
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


def environment_with_own_agent(directory: Path, ask: str, body: str = "LenientRequest") -> str:
    home = directory / "responses_api_agents" / "own_agent"
    home.mkdir(parents=True)
    (home / "app.py").write_text(AGENT % {"ask": ask, "body": body})
    return environment_with(directory, "own_agent")


def by_url(version: str) -> str | None:
    """How an agent that hands its key on in URLs is routed; `None` where no agent does."""
    return None if version in OLD else "indices" if version.startswith("0.5.") else "url"


def strict_by_client(version: str) -> str:
    """From 0.7 on a request model that allows no further entries keeps the rollout's id all the same."""
    return "url" if version == "0.7.0" else "process"


FINANCE = {"max_steps": 1, "no_tool_call_nudge": "", "max_time_seconds": 60, "abort_on_tool_error_types": []}
"""What its config must have from 0.6 on."""
CASES: dict[str, tuple[Callable[[Path], str], Callable[[str], str | None]]] = {
    "helpers": (lambda path: environment_with(path, "simple_agent"), lambda v: by_url(v) or "metadata"),
    "metadata": (lambda path: environment_with(path, "finance_agent", **FINANCE), lambda v: "metadata"),
    "body": (lambda path: environment_with_own_agent(path, BY_BODY), lambda v: "body"),
    "client": (lambda path: environment_with_own_agent(path, BY_CLIENT), lambda v: by_url(v) or "process"),
    "client, strict": (
        lambda path: environment_with_own_agent(path, BY_CLIENT, "BaseRunRequest"),
        strict_by_client,
    ),
    "process": (environment_with_forgetful_agent, lambda v: "process"),
}


def strategies_of(status: dict[str, Any]) -> dict[str, str]:
    (place,) = status["environments"].values()
    found: dict[str, str] = place["strategies"]
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", SUPPORTED_NEMO_GYM)
async def test_each_way_of_routing(version: str, name: str, tmp_path: Path) -> None:
    """Four rollouts at once: each asks its own policy only, and its own answer is verified with its own row."""
    make, expected = CASES[name]
    policies = [StampingPolicy(number, TOOLS) for number in range(1, 5)]
    fields = {"_ng_task_index": 7, "_ng_rollout_index": 3}
    async with acquire(stack_config(make(tmp_path), version=version, agent_processes=2)) as stack:
        assert strategies_of(await stack.status()) == {"agent": expected(version)}
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
@pytest.mark.parametrize("version", [each for each in SUPPORTED_NEMO_GYM if each not in OLD])
async def test_a_remote_service(version: str, tmp_path: Path) -> None:
    async with service() as url:
        path = environment_with(tmp_path, "remote_agent", agent_base_url=url, model_server=None)
        async with acquire(stack_config(path, version=version)) as stack:
            assert strategies_of(await stack.status()) == {"agent": "remote"}
            policy = StampingPolicy(1, TOOLS)
            rollout = await stack.run(stamped_row(1), policy=policy)
    assert (rollout.error, rollout.reward, policy.calls) == (None, 1.0, 2)


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
    assert warnings == [
        "warning: gymgate is not tested with nemo-gym 0.99.0, only with 0.3.0 to 0.7.0; trying it"
    ]


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


FORWARDING = {
    "0.7.0": KeyForwarding("url", ("observability", "capture"), plain=True, client=True),
    "0.6.0": KeyForwarding("url", ("observability", "capture"), plain=False, client=True),
    "0.5.1": KeyForwarding("indices", ("observability",), plain=False, client=True),
    "0.5.0": KeyForwarding("indices", ("observability",), plain=False, client=True),
    "0.4.0": KeyForwarding(),
    "0.3.1": KeyForwarding(),
    "0.3.0": KeyForwarding(),
}
NOT_BY_URL = {
    "0.7.0": {
        "metadata": {"finance_agent", "haystack_agent", "labbench2_vlm_agent", "langgraph_agent"},
        "body": {"mini_swe_agent", "mini_swe_agent_2"},
        "remote": {"remote_agent"},
        "process": {"harbor_agent", "harbor_agent_general"},
    },
    "0.6.0": {
        "metadata": {
            "critpt_agent",
            "finance_agent",
            "labbench2_vlm_agent",
            "langgraph_agent",
            "scicode_agent",
        },
        "body": {"mini_swe_agent", "mini_swe_agent_2"},
        "remote": {"remote_agent"},
        "process": {"anyswe_agent", "harbor_agent", "swe_agents", "verifiers_agent"},
    },
    "0.5.0": {
        "metadata": {
            "critpt_agent",
            "finance_agent",
            "labbench2_vlm_agent",
            "langgraph_agent",
            "scicode_agent",
        },
        "remote": {"remote_agent"},
        "process": {
            *(
                "anyswe_agent",
                "harbor_agent",
                "mini_swe_agent",
                "openclaw_agent",
                "opencode_agent",
                "pi_agent",
            ),
            *("pinchbench", "swe_agents", "verifiers_agent"),
        },
    },
}
"""Packaged agents that are routed otherwise than by URL, as their code was read by people."""


@pytest.mark.parametrize(
    "version",
    [pytest.param(each, marks=() if each == "0.7.0" else pytest.mark.heavy) for each in SUPPORTED_NEMO_GYM],
)
def test_what_the_base_classes_of_a_release_hand_on(version: str) -> None:
    runtime = ensure_runtime(RuntimeConfig(version=version))
    assert KeyForwarding(**asked(runtime)) == FORWARDING[version]


def asked(runtime: Runtime) -> dict[str, Any]:
    """What the fork server's question is answered with, in an interpreter of its own."""
    code = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('forwarding', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print('\\n' + json.dumps(module.key_forwarding(json.loads(sys.argv[2]))))\n"
    )
    source = Path(forkserver.__file__).with_name("forwarding.py")
    command = [runtime.python, "-c", code, source, json.dumps(gym_config.forwarding_order())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200, cwd="/")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "Traceback" not in done.stderr, done.stderr
    return {**found, "switches": tuple(found["switches"])}


@pytest.mark.parametrize(
    "version",
    [pytest.param(each, marks=() if each == "0.7.0" else pytest.mark.heavy) for each in NOT_BY_URL],
)
def test_how_packaged_agents_are_routed(version: str) -> None:
    site = ensure_runtime(RuntimeConfig(version=version)).site
    forwarding = FORWARDING[version]
    found: dict[str, set[str]] = {}
    for directory in sorted((site / "responses_api_agents").iterdir()):
        for entrypoint in entrypoints(directory):
            strategy = strategy_for(directory.name, forwarding, read_agent([site], directory, entrypoint))
            found.setdefault(strategy, set()).add(directory.name)
    assert len(found.pop(forwarding.body or "")) > 15
    assert found == NOT_BY_URL[version]


def entrypoints(directory: Path) -> list[str]:
    """Those that an agent's configs name, or the usual one."""
    named = {
        line.partition(":")[2].strip()
        for path in directory.glob("**/configs/*.yaml")
        for line in path.read_text().splitlines()
        if line.strip().startswith("entrypoint:")
    }
    return [name for name in sorted(named | {"app.py"}) if (directory / name).is_file()]
