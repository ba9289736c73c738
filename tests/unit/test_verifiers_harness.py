"""What the harness asks the stack for, and what becomes of the answer in verifiers' trace."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf

from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.integrations import stacks
from gymgate.integrations.failures import RolloutFailed
from gymgate.integrations.verifiers import harness
from gymgate.integrations.verifiers.harness import NeMoGymEnv, NeMoGymHarness, NeMoGymHarnessConfig
from gymgate.integrations.verifiers.taskset import GymRun, NeMoGymData
from gymgate.rollouts import ModelCall, Rollout, RolloutError

ROW: dict[str, Any] = {"responses_create_params": {"input": "hi"}}
CONFIG = StackConfig(environments=("mcqa",))


class Launch:
    """One launch of the harness on a stack that answers as told."""

    def __init__(self, answer: Rollout | Exception, **limits: Any) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}
        run = GymRun(environment="mcqa", stack=CONFIG, limits=RolloutLimits(**limits))
        self.data = NeMoGymData(id="mcqa/1", prompt="hi", row=ROW, gym=run)
        agent = vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))
        self.trace: vf.Trace[Any] = vf.Trace(
            task=vf.TraceTask(type="NeMoGymTask", data=self.data), agent=agent
        )

    async def run(self, row: Any, **asked: Any) -> Rollout:
        self.asked = {"row": row, **asked}
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def stack_for(self, config: StackConfig, progress: Any) -> Launch:
        return self

    def refuse_training(self, environment: str) -> None:
        raise ConfigError(f"{environment} has several policies")

    async def start(self, client_type: str = "eval") -> vf.ProgramResult:
        client = SimpleNamespace(
            type=client_type,
            base_url="http://policy/v1",
            headers={"x-team": "a"},
            headers_from_env={"x-org": "HARNESS_ORG"},
            api_key_var="HARNESS_KEY",
        )
        ctx: Any = SimpleNamespace(model="tiny", client=client)
        runtime: Any = None
        harness = NeMoGymHarness(NeMoGymHarnessConfig())
        return await harness.launch(ctx, self.trace, runtime, "http://intercept/v1", "secret", {}, self.data)


Made = Callable[..., Launch]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Made:
    def made(answer: Rollout | Exception, **limits: Any) -> Launch:
        found = Launch(answer, **limits)
        monkeypatch.setattr(stacks, "stack_for", found.stack_for)
        return found

    return made


def rollout(calls: int = 1, **fields: Any) -> Rollout:
    made = [ModelCall(index=number, dialect="chat", status_code=200) for number in range(calls)]
    return Rollout(
        **{"id": "r", "environment": "mcqa", "agent": "a", "status": "completed", "calls": made, **fields}
    )


async def test_calls_go_to_the_interception(launch: Made) -> None:
    started = launch(rollout(reward=1.0), timeout_s=77.0)
    assert (await started.start()).exit_code == 0
    policy = started.asked["policy"]
    assert (policy.base_url, policy.model, policy.timeout_s) == (
        "http://intercept/v1",
        "tiny",
        77.0,
    )
    assert policy.api_key.get_secret_value() == "secret"
    assert started.asked["rollout_id"] == started.trace.id


@pytest.mark.parametrize(("client_type", "counted"), [("eval", ["episode"]), ("train", [])])
async def test_episodes_are_counted_in_evals_alone(
    client_type: str, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training's log has no account, and its process no list that grows."""
    found: list[Any] = []

    async def run_slot(*_: Any) -> str:
        return "episode"

    monkeypatch.setattr(vf.SingleAgentEnv, "run_slot", run_slot)
    monkeypatch.setattr(harness, "add_episode", lambda tasks, episode: found.append(episode))
    env, ctx = NeMoGymEnv.__new__(NeMoGymEnv), SimpleNamespace(client=SimpleNamespace(type=client_type))
    assert await env.run_slot(None, ctx) == "episode"  # type: ignore[arg-type]
    assert found == counted


async def test_a_training_needs_one_policy_in_a_rollout(launch: Made) -> None:
    started = launch(rollout(reward=1.0))
    with pytest.raises(ConfigError, match="mcqa"):
        await started.start("train")
    assert started.asked == {}


async def test_a_judge_that_is_the_policys_model_is_asked_past_the_interception(
    launch: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_KEY", "real")
    monkeypatch.setenv("HARNESS_ORG", "b")
    started = launch(rollout(reward=1.0))
    await started.start()
    judge = started.asked["judge_policy"]
    assert (judge.base_url, judge.api_key.get_secret_value()) == ("http://policy/v1", "real")
    headers = {name: value.get_secret_value() for name, value in judge.headers}
    assert headers == {"x-team": "a", "x-org": "b"}
    assert judge.max_retries > 0


@pytest.mark.parametrize(
    ("limit", "stop"), [("max_calls", "max_turns"), ("context_length", None), (None, None)]
)
async def test_only_a_limit_of_calls_is_max_turns(launch: Made, limit: str | None, stop: str | None) -> None:
    """A context that is full is truncated too, by something else."""
    started = launch(rollout(status="truncated", reward=0.0, limit=limit))
    await started.start()
    assert started.trace.stop_condition == stop


async def test_a_failure_raises_one_line(launch: Made) -> None:
    error = RolloutError(kind="policy", message="no route", type="PolicyError")
    started = launch(rollout(status="failed", error=error))
    with pytest.raises(RolloutFailed, match=r"^\[mcqa\] policy: no route$"):
        await started.start()
