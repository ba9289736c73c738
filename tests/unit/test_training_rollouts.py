"""Rollouts of a training on a stack that comes, goes and hangs."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.integrations.training import rollouts as module
from gymgate.integrations.training.rollouts import RolloutRunner, rollout_metrics
from gymgate.rollouts import ModelCall, Rollout
from gymgate.stack import AgentInfo, Stack
from gymgate.tokens import TokenPolicy
from gymgate.tokens.engines import CallableEngine, Sample

ROW: dict[str, Any] = {"responses_create_params": {"input": "hi"}}
DONE = Rollout(id="r", environment="e", agent="a", status="completed", reward=1.0)


class FakeStack:
    """Ends each rollout as told; `how` is its result, an error, or `None`: never."""

    agents: ClassVar[dict[str, AgentInfo]] = {}
    names: ClassVar[dict[str, str]] = {}
    refuse_training = Stack.refuse_training

    def __init__(self) -> None:
        self.runs: list[asyncio.Future[Rollout]] = []
        self.asked: list[dict[str, Any]] = []
        self.closed = 0

    async def run(self, row: Any, **asked: Any) -> Rollout:
        self.asked.append(asked)
        self.runs.append(asyncio.get_running_loop().create_future())
        return await self.runs[-1]

    async def close(self) -> None:
        self.closed += 1


class Scene:
    """A runner, and the stacks they connected to."""

    def __init__(self, timeout_s: float) -> None:
        self.runner = RolloutRunner(StackConfig(environments=("e",)), RolloutLimits(timeout_s=timeout_s))
        self.stacks: list[FakeStack] = []

    async def connect(self, config: StackConfig, *, reconnect: bool, **_: Any) -> FakeStack:
        assert reconnect, "a stack that is lost starts again for the next rollout"
        self.stacks.append(FakeStack())
        await asyncio.sleep(0)  # others ask meanwhile
        return self.stacks[-1]

    async def begin(self, count: int = 1) -> list[asyncio.Task[Any]]:
        """So many attempts, each of which has reached its stack."""
        policy = TokenPolicy(
            CallableEngine(lambda ids, sampling: Sample([1], None, "stop")), SimpleNamespace()
        )  # type: ignore[arg-type]
        tasks = [asyncio.create_task(self.runner.run("e", ROW, policy.conversation())) for _ in range(count)]
        before = self.under_way
        while self.under_way < before + count:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return tasks

    @property
    def under_way(self) -> int:
        return sum(len(stack.runs) for stack in self.stacks)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(timeout_s=1000.0)
    monkeypatch.setattr(module, "connect", made.connect)
    return made


async def test_attempts_share_one_stack(scene: Scene) -> None:
    tasks = await scene.begin(3)
    [stack] = scene.stacks
    for run in stack.runs:
        run.set_result(DONE)
    found = [await task for task in tasks]
    assert [attempt.rollout.reward for attempt in found] == [1.0] * 3
    assert [attempt.first_prompt_ids for attempt in found] == [[]] * 3
    await scene.runner.close()
    await scene.runner.close()
    assert stack.closed == 1


async def test_a_loss_fails_the_attempts_on_it_and_not_the_next(scene: Scene) -> None:
    [task] = await scene.begin()
    scene.stacks[0].runs[0].set_exception(StackLostError("gone"))
    lost = (await task).rollout
    assert (lost.status, lost.reward) == ("failed", None)
    assert lost.error is not None
    assert (lost.error.kind, lost.error.message, lost.error.retryable) == ("infrastructure", "gone", True)
    [task] = await scene.begin()
    scene.stacks[0].runs[1].set_result(DONE)
    assert (await task).rollout.reward == 1.0
    assert (len(scene.stacks), scene.stacks[0].closed) == (1, 0)


async def test_a_stack_with_several_policies_is_refused_and_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = AgentInfo("e", "a", "simple_agent", untrainable="set e.environment_servers.turn.agent_server")
    monkeypatch.setattr(FakeStack, "agents", {"a": about})
    with pytest.raises(ConfigError, match="agent_server"):
        await scene.runner.start()
    assert scene.stacks[0].closed == 1


async def test_a_closed_runner_connects_again(scene: Scene) -> None:
    for count in (1, 2):
        await scene.begin()
        await scene.runner.close()
        assert [stack.closed for stack in scene.stacks] == [1] * count


async def test_a_mistake_of_the_callers_is_raised(scene: Scene) -> None:
    [task] = await scene.begin()
    scene.stacks[0].runs[0].set_exception(ValueError("no such row"))
    with pytest.raises(ValueError, match="no such row"):
        await task
    assert scene.stacks[0].closed == 0


class CountingRenderer:
    """Renders each message as 100 ids of its own."""

    def render_ids(self, messages: list[Any], **_: Any) -> list[int]:
        return [1000 + int(message["content"]) * 100 + at for message in messages for at in range(100)]

    def parse_response(self, token_ids: list[int], **_: Any) -> Any:
        return SimpleNamespace(content=str(token_ids[0]), reasoning_content=None, tool_calls=None)

    def get_stop_token_ids(self) -> list[int]:
        return [2]

    def bridge_to_next_turn(self, prompt: list[int], sampled: list[int], new: list[Any], **_: Any) -> Any:
        return SimpleNamespace(token_ids=[*prompt, *sampled, *self.render_ids(new)])


async def test_what_is_kept_of_a_rollout_grows_with_its_ids_not_with_their_square(scene: Scene) -> None:
    """Each prompt repeats the ones before it; twice the turns are twice the ids."""
    sizes = []
    policy = TokenPolicy(
        CallableEngine(lambda ids, sampling: Sample([len(ids)], [-0.5], "stop")), CountingRenderer()
    )
    for turns in (20, 40):
        task = asyncio.create_task(scene.runner.run("e", ROW, policy.conversation()))
        while len(sizes) == scene.under_way:  # noqa: ASYNC110
            await asyncio.sleep(0)
        history: list[dict[str, Any]] = []
        for number in range(turns):
            history.append({"role": "user", "content": str(number)})
            answer = await scene.stacks[0].asked[-1]["policy"]({"messages": history})
            history.append(answer["choices"][0]["message"])
        scene.stacks[0].runs[-1].set_result(DONE)
        attempt = await task
        assert len(attempt.segments) == 1
        assert (rollout_metrics(attempt)["turns"], rollout_metrics(attempt)["prefix_misses"]) == (turns, 0)
        sizes.append(len(pickle.dumps(attempt)))
    assert sizes[1] < 2.5 * sizes[0]


async def test_limits_and_policy_reach_the_stack(scene: Scene) -> None:
    await scene.begin()
    [asked] = scene.stacks[0].asked
    assert (asked["environment"], asked["limits"].timeout_s) == ("e", 1000.0)
    assert "record_bodies" not in asked


async def test_a_judge_that_is_the_policy_is_a_conversation_of_its_own(scene: Scene) -> None:
    """It is sampled as it asks, and leaves neither segments nor less room for the agent."""
    seen: list[dict[str, Any]] = []

    def sample(ids: list[int], sampling: dict[str, Any]) -> Sample:
        seen.append(sampling)
        return Sample([len(ids)], [-0.5], "stop")

    sampling = {"temperature": 1.0, "max_tokens": 5}
    policy = TokenPolicy(CallableEngine(sample), CountingRenderer(), sampling=sampling, max_completion_len=50)
    task = asyncio.create_task(scene.runner.run("e", ROW, policy.conversation()))
    while not scene.under_way:  # noqa: ASYNC110
        await asyncio.sleep(0)
    asked = scene.stacks[0].asked[-1]
    question = {"messages": [{"role": "user", "content": "1"}], "temperature": 0.25, "max_tokens": 90}
    await asked["judge_policy"](question)
    await asked["policy"]({"messages": [{"role": "user", "content": str(2)}]})
    scene.stacks[0].runs[-1].set_result(DONE)
    found = await task
    [segment] = found.segments
    assert (segment.prompt_ids[0], found.turns, found.prefix_misses) == (1200, 1, 0)
    assert [(each["temperature"], each["max_tokens"]) for each in seen] == [(0.25, 90), (1.0, 5)]
    policy.pause()
    held = asyncio.create_task(asked["judge_policy"](question))
    assert not (await asyncio.wait([held], timeout=0.05))[0]
    policy.resume()
    assert (await held)["choices"]


async def test_a_call_that_its_agent_gave_up_on_is_not_trained(scene: Scene) -> None:
    """The agent asks otherwise instead, after the same first call. What the abandoned call sampled is in no segment."""
    ids = itertools.count(5000)
    policy = TokenPolicy(
        CallableEngine(lambda prompt, sampling: Sample([next(ids)], [-0.5], "stop")), CountingRenderer()
    )
    task = asyncio.create_task(scene.runner.run("e", ROW, policy.conversation()))
    while not scene.under_way:  # noqa: ASYNC110
        await asyncio.sleep(0)
    history = [{"role": "user", "content": "1"}]
    calls = []
    for number, question in enumerate(("2", "3", "4")):
        answer = await scene.stacks[0].asked[-1]["policy"]({"messages": history})
        details = {"undelivered": answer["id"]} if number == 1 else {}
        calls.append(ModelCall(index=number, dialect="chat", status_code=200, details=details))
        if number != 1:
            history = [*history, answer["choices"][0]["message"]]
        history = [*history, {"role": "user", "content": question}]
    scene.stacks[0].runs[-1].set_result(DONE.model_copy(update={"calls": calls}))
    segments = (await task).segments
    trained = [
        token
        for segment in segments
        for token, on in zip(segment.completion_ids, segment.mask, strict=True)
        if on
    ]
    assert trained == [5000, 5002]
