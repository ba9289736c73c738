"""Rollouts of one process, on a stack that starts with the first of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from gymgate.config import RolloutLimits, StackConfig
from gymgate.errors import ConfigError, DataError, GymgateError, StackLostError
from gymgate.integrations.training.figures import Attempt
from gymgate.rollout import Rollout
from gymgate.rollout.result import failed_rollout
from gymgate.stack import AgentInfo, Stack, connect
from gymgate.tokens import TokenPolicy

logger = logging.getLogger(__name__)


class Attempts:
    """Attempts at rows; for one event loop."""

    def __init__(self, config: StackConfig, limits: RolloutLimits) -> None:
        self.config = config
        self.limits = limits
        self._stack: Stack | None = None
        self._starting: asyncio.Task[Stack] | None = None

    async def start(self) -> Stack:
        """Connect to the stack, starting it if it does not run. Returns when it is up, raises why it is not.

        All callers wait for one start and get its error. The next call after that tries again.
        """
        if self._stack is not None:
            return self._stack
        if self._starting is None:
            self._starting = asyncio.create_task(self._connect())
            self._starting.add_done_callback(self._started)
        return await asyncio.shield(self._starting)

    async def attempt(self, environment: str, row: Mapping[str, Any], policy: TokenPolicy) -> Attempt:
        """Run one rollout. Every failure comes back as data: of the row, of a lost stack, of a reconnect to it.

        Without an environment, the row goes to that of the agent that it names. Returns within about a second of the
        rollout deadline, once the stack is up; after a lost stack, the next attempt connects again.
        """
        conversation = policy.conversation()
        try:
            stack = await self.start()
            environment = environment or environment_of(row, stack.agents)
            rollout = await self._run(stack, environment, row, conversation)
        except GymgateError as error:
            rollout = failed_rollout(error, id="not-run", environment=environment)
        segments, shown = conversation.segments, conversation.first_prompt_ids
        return Attempt(rollout, segments, conversation.call_count, conversation.prefix_misses, shown)

    async def close(self) -> None:
        """Give the stack back, also one that is being started. Idempotent."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._stack is not None:
            await self._lose(self._stack)

    async def _connect(self) -> Stack:
        self._stack = await connect(self.config, progress=lambda line: logger.info("%s", line))
        return self._stack

    def _started(self, task: asyncio.Task[Stack]) -> None:
        self._starting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the stack did not start: %s", error)

    async def _run(
        self, stack: Stack, environment: str, row: Mapping[str, Any], conversation: Any
    ) -> Rollout:
        try:
            return await stack.run(
                row, policy=conversation, environment=environment, limits=self.limits, record_bodies=False
            )
        except ConfigError as error:  # the row names what this stack does not have
            raise DataError(error.message) from error
        except StackLostError:
            await self._lose(stack)
            raise

    async def _lose(self, stack: Stack) -> None:
        """Give this stack back, unless it was already; never the one that took its place."""
        if self._stack is stack:
            self._stack = None
            await stack.close()


def environment_of(row: Mapping[str, Any], agents: Mapping[str, AgentInfo]) -> str:
    """The environment of the agent that a row names, or the only one. `DataError` if there is none such."""
    name = (row.get("agent_ref") or {}).get("name")
    if isinstance(name, str) and name in agents:
        return agents[name].environment
    environments = sorted({agent.environment for agent in agents.values()})
    if name is None and len(environments) == 1:
        return environments[0]
    known = ", ".join(sorted(agents))
    raise DataError(f"the row's agent_ref names {name!r}, not an agent of the stack: {known}")
