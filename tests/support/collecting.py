"""A run whose attempts are made up: plan, directory, retries and progress are real, and no stack is started."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.rollouts import Rollout
from gymgate.runs.collected.run import Collection
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.described.plan import PlannedRollout
from gymgate.runs.stored.record import CollectedRollout
from gymgate.runs.stored.score import score_of

NOWHERE = "http://127.0.0.1:9/v1"


async def nothing() -> dict[str, Any]:
    """The status of a stack without model calls."""
    return {}


@dataclass
class MadeUpRun(Collection):
    """Makes attempts with `run_one`."""

    run_one: Callable[[PlannedRollout], Awaitable[Rollout]] = field(kw_only=True)
    agents: Mapping[str, str] = field(default_factory=dict)
    """Their environments."""
    status: Callable[[], Awaitable[Mapping[str, Any]]] = nothing

    @asynccontextmanager
    async def _acquire(self) -> AsyncIterator[Any]:
        agents = {name: SimpleNamespace(environment=environment) for name, environment in self.agents.items()}
        yield SimpleNamespace(
            agents=agents, status=self.status, description={"settings": {}, "max_rollouts": 1000}
        )

    async def _run_one(self, stack: Any, planned: PlannedRollout) -> Rollout:
        return await self.run_one(planned)


def made_up_run(
    plan: Any, run_one: Callable[[PlannedRollout], Awaitable[Rollout]], **fields: Any
) -> MadeUpRun:
    stack = StackConfig(environments=("mcqa",))
    policy = fields.pop("policy", HTTPEndpoint(base_url=NOWHERE, model="m"))
    return MadeUpRun(stack, policy, plan, run_one=run_one, **fields)


def as_collected(rollout: Rollout, repeat: int = 0, row_key: str = "0" * 16) -> CollectedRollout:
    """A rollout with a place in a run."""
    return CollectedRollout.model_construct(**rollout.__dict__, row_key=row_key, repeat=repeat)


def add(tasks: CollectedTasks, rollout: CollectedRollout) -> None:
    """Add a rollout as a run under way does."""
    tasks.add(score_of(rollout))
