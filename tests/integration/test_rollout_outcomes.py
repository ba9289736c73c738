"""Rollouts that were scored and measure nothing, on real stacks and in the installed release."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from gymgate.core.config import EnvironmentConfig, StackConfig
from gymgate.gym.catalog.needs import policy_servers
from gymgate.gym.inside.resolve import ServerInstance
from gymgate.gym.runtime import ensure_runtime
from gymgate.rollouts import Rollout
from gymgate.rollouts.breakdowns import AGENTS, breakdown
from gymgate.rollouts.outcome import SCORES_WITHOUT_POLICY
from gymgate.stack import acquire, acquire_sync
from support.stacks import answer, runtime, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm]

AGENT = """
from typing import ClassVar
from pydantic import ConfigDict
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import get_response_json

class Config(BaseResponsesAPIAgentConfig):
    model_server: ModelServerRef
    judge_model_server: ModelServerRef

class Request(BaseRunRequest):
    model_config = ConfigDict(extra="allow")

class Response(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")

class Agent(SimpleResponsesAPIAgent):
    "Asks the model servers that its row names, and gives the reward and the fields that it names."
    ray_enabled: ClassVar[bool] = False
    config: Config

    async def responses(self, body: dict) -> dict:
        raise NotImplementedError

    async def run(self, body: Request) -> Response:
        said = {"id": "none", "created_at": 0, "model": "none", "object": "response", "output": [],
                "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        for name in body.model_extra["asks"]:
            print("asking", name, "failed: no such thing", flush=True)
            answer = await self.server_client.post(
                server_name=name, url_path=self.url_path_for_run("/v1/responses", body), json={"input": "hi"})
            said = await get_response_json(answer)
        print("the container failed to start", flush=True)
        return Response(**body.model_dump(exclude={"asks", "says"}), response=said, **body.model_extra["says"])

if __name__ == "__main__":
    Agent.run_webserver()
"""
CONFIG = """
own_agent:
  responses_api_agents:
    TYPE:
      entrypoint: app.py
      model_server: {type: responses_api_models, name: NAME}
      judge_model_server: {type: responses_api_models, name: judge_model}
judge_model:
  responses_api_models:
    openai_model: {entrypoint: app.py, openai_base_url: x, openai_api_key: x, openai_model: x}
other_model:
  responses_api_models:
    openai_model: {entrypoint: app.py, openai_base_url: x, openai_api_key: x, openai_model: x}
"""


def own(
    directory: Path, agent_type: str = "own_agent", model: str = "policy_model", **fields: Any
) -> EnvironmentConfig:
    """An environment that is nothing but an agent."""
    home = directory / "responses_api_agents" / agent_type
    home.mkdir(parents=True)
    (home / "app.py").write_text(AGENT)
    path = home / f"{directory.name}.yaml"  # which is the environment's name
    path.write_text(CONFIG.replace("TYPE", agent_type).replace("NAME", model))
    return EnvironmentConfig(name=str(path), **fields)


def row(*asks: str, **says: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "hi"}, "asks": asks, "says": {"reward": 0.0, **says}}


AGENTS_HERE: dict[str, dict[str, Any]] = {
    "plain": {},
    "unasked": {"scores_without_policy": True},
    "elsewhere": {"model": "other_model"},
    "mini_swe": {"agent_type": "mini_swe_agent_2"},
}
Run = Callable[..., Coroutine[Any, Any, list[Rollout]]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackConfig]:
    """Of a stack that is up, with an environment for each of `AGENTS_HERE`."""
    environments = [own(tmp_path_factory.mktemp(name), **fields) for name, fields in AGENTS_HERE.items()]
    config = stack_config(*environments, models={"judge_model": "policy", "other_model": "policy"})
    with acquire_sync(config):
        yield config


@pytest.fixture
async def run(config: StackConfig) -> AsyncIterator[Run]:
    """Runs rows in the environment of that name."""
    names = dict(zip(AGENTS_HERE, (each.name for each in config.environments), strict=True))
    async with acquire(config) as stack:
        policy = stack.register("scripted", lambda body: answer(), dialect="responses")

        async def run_rows(name: str, *rows: dict[str, Any]) -> list[Rollout]:
            return [await stack.run(each, policy=policy, environment=names[name]) for each in rows]

        yield run_rows


async def test_no_policy_call_no_reward(run: Run) -> None:
    rows = row(), row("judge_model"), row("judge_model", "policy_model", reward=0.5), row(reward=1.0)
    unasked, judged, asked, praised = await run("plain", *rows)
    for rollout in (unasked, judged, praised):
        assert rollout.error is not None
        assert (rollout.status, rollout.reward, rollout.error.kind) == ("failed", None, "environment")
        assert rollout.error.type == "PolicyNeverAskedError"
        assert rollout.error.message.startswith("agent 'own_agent' ")
        assert "the container failed to start" in rollout.error.message
    assert len(judged.calls) == 1
    assert (asked.status, asked.reward, asked.error) == ("completed", 0.5, None)


async def test_an_environment_may_be_named_as_one_that_scores_without_the_policy(run: Run) -> None:
    (rollout,) = await run("unasked", row(reward=1.0))
    assert (rollout.status, rollout.reward, rollout.error) == ("completed", 1.0, None)


async def test_an_agent_that_is_pointed_at_another_model_asks_that(run: Run) -> None:
    rows = row(), row("judge_model"), row("other_model", reward=0.5)
    silent, judged, asked = await run("elsewhere", *rows)
    assert (silent.status, judged.status) == ("failed", "failed")
    assert (asked.status, asked.reward) == ("completed", 0.5)


async def test_a_result_that_reports_its_agents_breakdown_is_no_reward(run: Run) -> None:
    """An agent of the name of a packaged one, which says in the same way that it could not work."""
    broken, sound, of_gym, masked = await run(
        "mini_swe",
        row("policy_model", metadata={"error": "no such image: swe/x"}),
        row("policy_model", metadata={"eval_report": {}}),
        row("policy_model", _ng_failure_class="transient", error="sandbox is gone"),
        row("policy_model", mask_sample=True, reward=1.0),
    )
    for rollout, told in (broken, "no such image: swe/x"), (of_gym, "transient: sandbox is gone"):
        assert rollout.error is not None
        assert (rollout.status, rollout.reward, rollout.error.kind) == ("failed", None, "environment")
        assert told in rollout.error.message
        assert "'own_agent'" in rollout.error.message
    assert (sound.status, sound.reward) == ("completed", 0.0)
    assert masked.status == "masked"


def test_every_packaged_agent_knows_a_model_or_is_named() -> None:
    """Harbor's own settings name the model of `harbor_agent_general`; without the gateway's URL there it asks no policy."""
    agents = ensure_runtime(runtime()).site / "responses_api_agents"
    knows_none = {
        home.name
        for home in agents.iterdir()
        if (sources := [file.read_text() for file in home.rglob("*.py")])
        and not any(re.search("model_server|model_base_url|policy_base_url", text) for text in sources)
    }
    assert knows_none == {*SCORES_WITHOUT_POLICY, "harbor_agent_general"}


def test_packaged_agents_that_are_pointed_at_other_models_than_the_policy() -> None:
    others: dict[str, set[str]] = {}
    for path in ensure_runtime(runtime()).site.glob("re*/**/configs/*.yaml"):
        for name, block in _agents(path):
            models = policy_servers(ServerInstance("x", "responses_api_agents", name, block))
            if models != {"policy_model"}:
                others.setdefault(name, set()).update(models)
    assert others == OTHER_MODELS


OTHER_MODELS = {
    "conversational_tool_use/domain_generation": {"domain_generation_model"},
    "conversational_tool_use/policy_tool_generation": {"policy_generation_model"},
    "conversational_tool_use/scenario_generation": {"scenario_generation_model"},
    "simple_agent": {"policy_model_reasoning_off", "user_model"},
    "simple_agent_with_compaction": {"policy_model_for_compaction"},
}


def _agents(path: Path) -> list[tuple[str, dict[str, Any]]]:
    node = yaml.safe_load(path.read_text())
    return [
        (name, block)
        for top in (node.values() if isinstance(node, dict) else ())
        if isinstance(top, dict) and isinstance(top.get("responses_api_agents"), dict)
        for name, block in top["responses_api_agents"].items()
        if isinstance(block, dict)
    ]


def test_no_packaged_recording_is_taken_for_a_breakdown() -> None:
    """Their rewards are the release's own examples: each is a score, but for masked ones and two whose tests timed out."""
    site = ensure_runtime(runtime()).site
    seen, broken = 0, []
    for path in site.glob("re*/*/data/example_rollouts.jsonl"):
        for line in path.read_bytes().splitlines():
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(value, dict) and "reward" in value:
                seen += 1
                found = filter(None, (breakdown(value, agent) for agent in _agents_of(path)))
                broken += [(path.parts[-3], reason) for reason in found]
    assert seen > 500
    assert {(name, "PTY command timed out" in reason) for name, reason in broken} == {
        ("terminal_bench_2_1", True)
    }


def _agents_of(path: Path) -> list[str]:
    """The agents that record there."""
    text = " ".join(file.read_text() for file in path.parent.parent.glob("configs/*.yaml"))
    return [agent for agent in AGENTS if re.search(rf"^\s+{agent}:", text, re.MULTILINE)] or ["simple_agent"]


@pytest.mark.parametrize("agent", AGENTS)
def test_the_installed_agent_writes_the_fields_that_are_read(agent: str) -> None:
    fields = {
        "browsecomp_agent": ['"agent_error"'],
        "cvdp_agent": ['"cvdp-agent-error"', "container_stderr"],
        "finance_agent": ['"stop_reason"', 'ERROR = "error"'],
        "gdp_pdf_agent": ['"document_delivery"', "unclassified_", "verify_failed_", '"limit"'],
        "harbor_agent": ["trial_result if trial_result else {}", '"verifier_result"', '"exception_info"'],
        "mini_swe_agent": ['result.get("eval_report", {}) if result else {}'],
        "mini_swe_agent_2": ['error_info = {"error": str(e)', 'metadata=result.get("eval_report"'],
        "miniswe_sandboxed_agent": ['reason="infrastructure_error"', "termination=termination", "detail="],
        "opencode_sandboxed_agent": [
            f'"opencode_{name}"' for name in ("failed", "error_type", "exit_code", "run_stderr")
        ],
        "pi_sandboxed_agent": [f'"pi_{name}"' for name in ("failed", "error_type", "exit_code")],
        "pinchbench": ['"status": "error"', '"status": "missing_task"'],
        "stirrup_agent": ['payload["error_message"] = reason'],
        "terminus_2_sandboxed_agent": ['"terminus2_completed": terminus2_completed', '"error": error'],
        "vcqa_agent": ["error=run_error", 'error="empty model answer"'],
    }
    source = "".join(
        file.read_text()
        for file in (ensure_runtime(runtime()).site / "responses_api_agents" / agent).glob("*.py")
    )
    assert [field for field in fields[agent] if field not in source] == []
