"""The plugin's pure half: settings, the task on the wire, and scoring. Needs verifiers, not NeMo Gym."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.utils.loaders import environment_class, harness_class, taskset_class

from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.integrations.failures import failure_of
from gymgate.integrations.verifiers.harness import NeMoGymEnv, NeMoGymHarness, with_system_prompt
from gymgate.integrations.verifiers.taskset import (
    GymRun,
    NeMoGymConfig,
    NeMoGymData,
    NeMoGymTask,
    NeMoGymTaskset,
    store_result,
)
from gymgate.rollouts import ModelCall, Rollout, RolloutError, Usage

ROW: dict[str, Any] = {"responses_create_params": {"input": "hi"}, "answer": None, "tags": ["a"]}


def make_task(**data: Any) -> NeMoGymTask:
    run = GymRun(environment="mcqa", stack=StackConfig(environments=("mcqa",)))
    return NeMoGymTask(NeMoGymData(**{"id": "mcqa/1", "prompt": "hi", "row": ROW, "gym": run, **data}))


def make_trace(task: NeMoGymTask) -> vf.Trace[Any]:
    agent = vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))
    return vf.Trace(task=vf.TraceTask(type="NeMoGymTask", data=task.data), agent=agent)


def make_rollout(**fields: Any) -> Rollout:
    return Rollout(**{"id": "r", "environment": "mcqa", "agent": "a", "status": "completed", **fields})


def test_the_loader_finds_one_of_each() -> None:
    assert taskset_class("nemo-gym-env") is NeMoGymTaskset
    assert harness_class("nemo-gym-env") is NeMoGymHarness
    assert environment_class("owner/nemo-gym-env@0.1.0") is NeMoGymEnv


def test_the_default_agent_runs_locally() -> None:
    config = vf.resolve_env_config({"taskset": {"id": "nemo-gym-env"}})
    assert config.agent.runtime.type == "subprocess"
    assert isinstance(config.taskset, NeMoGymConfig)
    assert config.agent_harnesses()["agent"].id == "nemo-gym-env"


def test_a_run_saved_with_an_earlier_name_is_read() -> None:
    assert NeMoGymConfig(**{"agent_processes": 7}).run_spec().stack.agent_processes == 7


def test_settings_describe_one_stack() -> None:
    config = NeMoGymConfig(
        env="mcqa",
        gym="0.6.0",
        overrides={"mcqa": {"resources_servers": {"mcqa": {"limit": "3"}}}},
        models={
            "*": "policy",
            "judge": "http://h/v1",
            "sim": {"base_url": "http://s/v1", "api_key_env": "K"},
            "tools": "none",
            "search": None,
        },
    )
    stack = config.run_spec().stack
    assert stack.environments[0].overrides == (("mcqa.resources_servers.mcqa.limit", 3),)
    models = dict(stack.models)
    assert models["*"] == "policy"
    assert models["tools"] == models["search"] == "none"
    assert models["judge"] == HTTPEndpoint(base_url="http://h/v1")
    assert models["sim"] == HTTPEndpoint(base_url="http://s/v1", api_key_env="K")
    assert NeMoGymConfig.model_validate(config.model_dump(mode="json")).run_spec().stack == stack


def test_several_environments_with_commas_or_as_a_list() -> None:
    several = NeMoGymConfig(env="mcqa, calendar")
    assert several.environment_names() == ("mcqa", "calendar")
    assert several.run_spec().stack == NeMoGymConfig(env=["mcqa", "calendar"]).run_spec().stack
    assert several.name == "mcqa+calendar"


def test_a_path_with_a_comma_is_one_environment(tmp_path: Path) -> None:
    (config := tmp_path / "sizes 1,2.yaml").touch()
    assert NeMoGymConfig(env=str(config)).environment_names() == (str(config),)
    settings = NeMoGymConfig(env="mcqa", config=str(config), component_roots=str(tmp_path))
    assert (settings.config, settings.component_roots) == ([str(config)], [str(tmp_path)])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env": "a,b", "config": "c"}, "config .*2"),
        ({"env": []}, "environments"),
        ({"env": "a,a"}, "more than once"),
        ({"models": {"judge": {"base_url": "u", "api_key": "secret"}}}, "api_key_env"),
        ({"models": {"judge": 3}}, "models"),
        ({"nonsense": 1}, "nonsense"),
        ({"dialect": "messages"}, "dialect"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        NeMoGymConfig(**settings)


def test_a_task_survives_the_wire_whole() -> None:
    task = make_task()
    wire = task.data.model_dump(mode="json")
    assert NeMoGymData.model_validate(wire) == task.data
    assert NeMoGymData.model_validate(wire).row == ROW
    assert task.key == "mcqa/1"


async def test_a_scored_rollout_has_reward_parts_and_metrics() -> None:
    task = make_task()
    trace = make_trace(task)
    usage = Usage(input_tokens=10, output_tokens=2, cached_tokens=4)
    judge = ModelCall(index=0, model_server="judge", dialect="chat", usage=usage)
    store_result(
        trace,
        make_rollout(
            reward=0.25,
            reward_parts={"format": 1.0},
            metrics={"turns": 3.0},
            result={"reward": 0.25},
            calls=[judge],
        ),
    )
    await task.score(trace)
    assert trace.reward == 0.25
    assert trace.rewards["reward"] == vf.Reward(score=0.25)
    assert trace.rewards["format"] == vf.Reward(score=1.0, weight=0.0)
    assert trace.metrics == {"turns": 3.0, "nemo_gym/unscored": 0.0}
    assert trace.info["nemo_gym"]["result"] == {"reward": 0.25}
    assert trace.extra_usage == [vf.Usage(prompt_tokens=6, completion_tokens=2, cached_input_tokens=4)]


@pytest.mark.parametrize("ended", [None, "completed", "truncated", "failed"])
async def test_a_rollout_without_a_reward_is_marked_unscored_not_zero(ended: str | None) -> None:
    task = make_task()
    trace = make_trace(task)
    if ended:
        store_result(trace, make_rollout(status=ended, reward_parts={"format": 1.0}))
        assert trace.agent.trainable is False
    await task.score(trace)
    assert trace.rewards == {"reward": None}
    assert trace.metrics["nemo_gym/unscored"] == 1.0


async def test_a_masked_rollout_counts_for_nothing() -> None:
    task = make_task()
    trace = make_trace(task)
    store_result(trace, make_rollout(status="masked", reward=0.0, metrics={"turns": 3.0}))
    await task.score(trace)
    assert trace.agent.trainable is False
    assert trace.rewards == {"reward": None}
    assert trace.metrics == {"turns": 3.0, "nemo_gym/unscored": 1.0}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reward": 1.0}, None),
        ({"status": "truncated"}, None),
        ({"status": "masked", "reward": 0.0, "result": {"reward": 0.0}}, None),
        (
            {"status": "failed", "error": RolloutError(kind="policy", type="PolicyError", message="a\n b")},
            "[mcqa] policy: a b",
        ),
        (
            {
                "status": "failed",
                "error": RolloutError(kind="policy", type="JudgeError", message="a", judge=True),
            },
            "[mcqa] judge: a",
        ),
    ],
)
def test_why_a_rollout_failed_is_one_line(fields: dict[str, Any], reason: str | None) -> None:
    assert failure_of(make_rollout(**fields)) == reason


@pytest.mark.parametrize(
    "opening",
    [
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"role": "developer", "content": "old"}, {"role": "user", "content": "hi"}],
    ],
)
def test_a_system_prompt_of_the_run_replaces_the_rows(opening: Any) -> None:
    row = {"responses_create_params": {"input": opening, "tools": []}, "answer": "x"}
    changed = with_system_prompt(row, "new")
    assert changed["responses_create_params"]["input"] == [
        {"role": "system", "content": "new"},
        {"role": "user", "content": "hi"},
    ]
    assert row["responses_create_params"]["input"] == opening
