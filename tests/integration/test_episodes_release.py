"""The environment servers of NeMo Gym's release, and its own rules for what they are sent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gymgate import Rollout, Stack
from gymgate.core import codec
from gymgate.core.config import EnvironmentConfig, StackConfig
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import clean_env, ensure_runtime, open_catalog
from gymgate.stack.daemon.routing import episode_request
from support.episodes import episodes
from support.stacks import SIMPLE, call_then_answer, name_of, runtime, stack_config
from support.upstream import MODELS, Seen, chat_answer, upstream_in_thread

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(300)]

LEGACY = f"{SIMPLE}_single_agent_turn"
TURN = f"""
config_paths: [environment_servers/single_agent_turn/configs/single_agent_turn.yaml]
maths:
  resources_servers:
    {SIMPLE}: {{entrypoint: app.py, domain: agent, verified: false, description: of the release, value: tests}}
solver:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      model_server: {{type: responses_api_models, name: policy_model}}
turn:
  _inherit_from: single_agent_turn
  environment_servers:
    single_agent_turn:
      resources_server: {{type: resources_servers, name: maths}}
      agent_server: {{type: responses_api_agents, name: solver}}
      resources_tool_transports: [direct_http]
"""
_MADE_ANEW = re.compile(r"\b(?:call|fc|msg|resp)_[0-9a-z]+")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StackConfig:
    """The same environment by its agent, by the release's own config, and by one of ours."""
    path = tmp_path_factory.mktemp("turn") / "turn.yaml"
    path.write_text(TURN)
    legacy = open_catalog(runtime(), (), progress=print).find(SIMPLE).config(LEGACY).path
    return stack_config(SIMPLE, EnvironmentConfig(name=str(legacy)), EnvironmentConfig(name=str(path)))


def said(rollout: Rollout) -> tuple[Any, ...]:
    """Everything that was said in a rollout and what came of it, without ids that each rollout makes anew."""
    asked = [(call.model_server, call.request, call.response) for call in rollout.calls]
    answered = (rollout.result or {}).get("response")
    return (rollout.status, rollout.reward, _MADE_ANEW.sub("id", json.dumps([asked, answered])))


async def test_three_ways_to_run_a_row_give_the_same_transcript_and_reward(
    stack: Stack, config: StackConfig
) -> None:
    environment = open_catalog(runtime(), (), progress=print).find(SIMPLE)
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    for row in open_rows("example", environment=environment):
        rollouts = [
            await stack.run(
                row.data,
                policy=policy,
                environment=name_of(stack, spec.name),
                record_bodies=True,
            )
            for spec in config.environments
        ]
        direct, legacy, turn = map(said, rollouts)
        assert direct == legacy == turn
        assert direct[:2] == ("completed", 1.0)
        assert [rollout.agent for rollout in rollouts] == [
            f"{SIMPLE}_simple_agent",
            f"{SIMPLE}_session_agent",
            "solver",
        ]
        results = [{*(rollout.result or {})} - {"agent_ref"} for rollout in rollouts]
        assert results[0] == results[1] == results[2]


async def test_a_failure_without_an_envelope_is_one_of_ours(stack: Stack, config: StackConfig) -> None:
    """The release's own config reports failures as flat results."""

    def fails(body: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("out of memory")

    policy = stack.register("fails", fails, dialect="responses")
    for spec in config.environments[1:]:
        row = next(iter(open_rows("example", environment=open_catalog(runtime(), ()).find(SIMPLE)))).data
        rollout = await stack.run(row, policy=policy, environment=name_of(stack, spec.name))
        assert (rollout.status, rollout.reward) == ("failed", None)
        assert rollout.error is not None
        assert (rollout.error.kind, "out of memory" in rollout.error.message) == ("policy", True)


def in_gym(program: str, *arguments: str, directory: Path) -> str:
    """What a program prints in NeMo Gym's interpreter."""
    python = ensure_runtime(runtime()).python
    done = subprocess.run(
        [python, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=directory,
        env={**clean_env(), "PYTHONPATH": str(directory)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ROWS: Sequence[dict[str, Any]] = [
    {"task_id": 7, "answer": "4"},
    {"problem_id": "p", "instance_id": "i", "agent_ref": {"name": "a"}, "skills_ref": {"hash": "h"}},
    {"instance_id": "i", "task_source": "another", "_ng_rollout_index": 3, "_ng_attempt_index": 1},
    {"task_id": None, "_ng_task_index": 3, "nested": {"task_input": [1]}},
    {"answer": "none of these", "_ng_task_index": 5},
]
MATERIALIZE = """
import json, sys
from nemo_gym.episode_types import EpisodeId
from nemo_gym.global_config import TASK_SOURCE_KEY_NAME
from nemo_gym.task_materialization import materialize_task
for row in json.loads(sys.argv[1]):
    task = materialize_task(row, taskset=row.get(TASK_SOURCE_KEY_NAME, "mine"), task_index=5)
    episode = EpisodeId(rollout_id=sys.argv[2]).model_dump(mode="json")
    assert EpisodeId(rollout_id=sys.argv[2]).capture_key == sys.argv[2]
    print(json.dumps({"episode_id": episode, "task": task}))
"""


def test_an_episode_is_what_nemo_gym_makes_of_a_row(tmp_path: Path) -> None:
    rows = [{"responses_create_params": {"input": []}, **row} for row in ROWS]
    key = "0123456789abcdef" * 2
    theirs = in_gym(MATERIALIZE, json.dumps(rows), key, directory=tmp_path).splitlines()
    ours = [codec.loads(episode_request(codec.dumps(row), key=key, taskset="mine")) for row in rows]
    assert ours == [json.loads(line) for line in theirs]


CONFORM = """
import os
os.environ["NEMO_GYM_CONFIG_DICT"] = "{}"
from unittest.mock import MagicMock
from nemo_gym.base_resources_server import BaseResourcesServerConfig, ResourcesSeedSessionRequest
from nemo_gym.server_utils import ServerClient
from nemo_gym.testing.session_conformance import check_resources_session_contract
from resources_servers.duet.app import Duet
config = BaseResourcesServerConfig(name="duet", host="127.0.0.1", port=1, entrypoint="app.py", domain="other")
server = Duet(config=config, server_client=MagicMock(spec=ServerClient))
seed = ResourcesSeedSessionRequest(
    resources_session_id="s", episode_id={"rollout_id": "r"}, task_id={"taskset": "t", "task_id": "1"}, task_data={})
check_resources_session_contract(server.setup_webserver(), seed, keeps_state=True)
"""


def test_the_resources_server_of_our_episodes_keeps_nemo_gyms_contract(tmp_path: Path) -> None:
    """So that the sessions that our tests count are opened and closed as NeMo Gym means it."""
    episodes(tmp_path)
    in_gym(CONFORM, directory=tmp_path)


@pytest.mark.heavy
def test_nemo_gyms_own_collector_gives_the_same_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the environment server of the release's config, which the collector sends rows to as well."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # `benchmarks`
    from benchmarks.agreement import VLLM_MODEL
    from benchmarks.doors import transcript
    from benchmarks.gym_collector import SHARED, stock_stack

    rows = tmp_path / "rows.jsonl"
    environment = open_catalog(runtime(), (), progress=print).find(SIMPLE)
    rows.write_text(environment.data_file().path.read_text())
    with upstream_in_thread(_calls_a_tool_then_answers) as policy:
        url = policy.url.removesuffix("/v1")
        servers = (*SHARED, "environment_servers/single_agent_turn_legacy", "responses_api_models/vllm_model")
        with stock_stack(
            f"{url}/v1", environments=[SIMPLE], servers=servers, model_configs=(VLLM_MODEL,), config=LEGACY
        ) as stock:
            log = stock.run(f"{SIMPLE}_session_agent", rows, tmp_path / "gym.jsonl")
        output = tmp_path / "gymgate"
        options = ["--config", LEGACY, "--data", str(rows), "-b", f"{url}/v1", "-o", str(output)]
        done = subprocess.run(
            [sys.executable, "-m", "gymgate", "run", SIMPLE, *options],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert (tmp_path / "gym.jsonl").exists(), log[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = sorted(_lines(tmp_path / "gym.jsonl"), key=lambda line: line["_ng_task_index"])
    ours = sorted(_lines(output / "rollouts.jsonl"), key=lambda line: line["line"])
    assert {line["_ng_environment_server"] for line in theirs} == {LEGACY}
    assert len(ours) == len(theirs) == 5
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["reward"] == other["reward"] == 1.0
        assert transcript(mine["result"]) == transcript(other)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def _calls_a_tool_then_answers(seen: Seen) -> web.Response:
    if not seen.path.endswith("/chat/completions"):
        return web.json_response(MODELS)
    body = seen.body
    if any(message["role"] == "tool" for message in body["messages"]):
        return web.json_response(chat_answer("cold"))
    name = body["tools"][0]["function"]["name"]
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": '{"city": "Rome"}'}}
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    return web.json_response(
        chat_answer(choices=[{"index": 0, "message": message, "finish_reason": "tool_calls"}])
    )
