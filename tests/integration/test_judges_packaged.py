"""Packaged environments whose judge dies while their rollouts are under way."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig, RuntimeConfig
from gymgate.gym.catalog import Catalog
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import ensure_runtime
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire
from gymgate.stack.ports import HeldPort
from support.judges import MortalJudge, endpoint, saying
from support.stacks import stack_config

pytestmark = [
    pytest.mark.gym,
    pytest.mark.warm,
    pytest.mark.timeout(900),
]  # the first use of a release installs it

COHORT = 2
COMPARE = "genrm_compare_resources_server.resources_servers.genrm_compare"
ONCE = {f"{COMPARE}.num_rollouts_per_prompt": COHORT, f"{COMPARE}.genrm_parse_retries": 0}
GENRM = EnvironmentConfig(name="genrm_compare", overrides=tuple(ONCE.items()))
AGENTS_OWN = "policy_model_reasoning_off"
"""The policy's name in `genrm_compare`."""
SCORES = json.dumps({"score_1": 4, "score_2": 2, "ranking": 2})


async def first_row(name: str) -> dict[str, Any]:
    runtime = await asyncio.to_thread(ensure_runtime, RuntimeConfig())
    row: dict[str, Any] = open_rows("example", environment=Catalog(runtime.site, runtime.version).find(name))[
        0
    ].data
    return {key: value for key, value in row.items() if key != "agent_ref"}


async def run(stack: Stack, name: str, row: Mapping[str, Any], text: str) -> Rollout:
    return await stack.run(row, policy=saying(text), environment=name)


async def cohort(stack: Stack, row: Mapping[str, Any], task: int) -> list[Rollout]:
    """Rollouts that the environment scores against each other."""
    group = {"_ng_group_id": uuid.uuid4().hex, "_ng_task_index": task}
    members = ({**row, **group, "_ng_rollout_index": index} for index in range(COHORT))
    jobs = (run(stack, GENRM.name, each, f"answer {task}-{n}") for n, each in enumerate(members))
    return await asyncio.gather(*jobs)


def assert_as_answered(judge: MortalJudge, rollouts: Mapping[str, Rollout]) -> None:
    """A rollout has a score if every question about its text was answered, else it failed."""
    for text, rollout in rollouts.items():
        if any(text in question for question in judge.failed):
            assert (rollout.status, rollout.reward) == ("failed", None), rollout.result
            assert rollout.error is not None
            assert rollout.error.kind == "policy"
            assert "model server '" in rollout.error.message
        else:
            assert rollout.error is None
            assert rollout.reward is not None
    assert {rollout.status for rollout in rollouts.values()} == {"completed", "failed"}


async def test_judges_that_are_asked_for_a_rollout_and_for_a_cohort() -> None:
    """simpleqa asks through NeMo Gym's `call_judge`, jailbreak_detection takes a failed call for a verdict, and
    genrm_compare asks for a cohort, in a task that knows no rollout."""
    port = HeldPort()
    models: dict[str, Any] = {AGENTS_OWN: "policy", "*": endpoint(port.number)}
    names = ("simpleqa", "jailbreak_detection")
    rows = {name: await first_row(name) for name in (*names, GENRM.name)}
    async with acquire(stack_config(*names, GENRM, models=models)) as stack:
        for name in names:
            judge = MortalJudge(said="A")
            async with judge.serving(port.number):
                first, *rest = (f"{name} gives {n}." for n in range(6))
                found = {first: await run(stack, name, rows[name], first)}
                # Fewer than the others ask, in whatever order they arrive.
                judge.lives = len(judge.answered) + 2
                rollouts = await asyncio.gather(*(run(stack, name, rows[name], text) for text in rest))
                assert_as_answered(judge, found | dict(zip(rest, rollouts, strict=True)))
        judge = MortalJudge(said=SCORES)
        async with judge.serving(port.number):
            scored = await cohort(stack, rows[GENRM.name], 1)
            assert [rollout.error for rollout in scored] == [None] * COHORT
            assert [rollout.reward for rollout in scored] == [3.0] * COHORT
            held = judge.held = asyncio.Event()
            running = asyncio.gather(*(cohort(stack, rows[GENRM.name], task) for task in (2, 3)))
            await judge.waits(4)
            judge.lives, judge.held = len(judge.answered) + 1, None
            held.set()
            for rollout in [each for members in await running for each in members]:
                assert (rollout.status, rollout.reward) == ("failed", None)
                assert rollout.error is not None
                assert "one rollout" in rollout.error.message
    port.close()


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "judge_name"), [("arena", "judge_model"), ("verifif", "policy_base_url")])
async def test_judges_of_environments_with_packages(name: str, judge_name: str) -> None:
    """arena takes a failed call for a tie; verifif asks by an address, with a client of its own."""
    port = HeldPort()
    row = await first_row(name)
    async with acquire(stack_config(name, models={judge_name: endpoint(port.number)})) as stack:
        judge = MortalJudge(said="[[A=B]] [[YES]]")
        async with judge.serving(port.number):
            (before,) = await asyncio.gather(run(stack, name, row, "an early answer"))
            assert (before.status, before.error) == ("completed", None)
            assert before.reward is not None
            judge.lives = len(judge.answered)
            for rollout in await asyncio.gather(*(run(stack, name, row, f"answer {n}") for n in range(3))):
                assert (rollout.status, rollout.reward) == ("failed", None)
                assert rollout.error is not None
                assert f"model server '{judge_name}'" in rollout.error.message
    port.close()
