"""The solver: hands a sample's row to its NeMo Gym agent, with Inspect's model as the policy."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from inspect_ai.agent import AgentState
from inspect_ai.hooks import Hooks, RunEnd, SampleEnd, TaskStart, hooks
from inspect_ai.log import EvalSample
from inspect_ai.model import ModelOutput
from inspect_ai.solver import Generate, Solver, TaskState, solver

from gymgate.core.config import CallableEndpoint
from gymgate.core.errors import printable
from gymgate.core.task_groups import task_group
from gymgate.integrations import stacks
from gymgate.integrations.eval_options import EvalOptions
from gymgate.integrations.failures import RolloutFailed, failure_of
from gymgate.integrations.inspect.policy import InspectPolicy, bridged
from gymgate.rollouts import Rollout
from gymgate.runs.counted.account import Account
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.described.settings import example_note, is_example
from gymgate.runs.stored.attempts import Attempt, StoredError
from gymgate.runs.stored.score import Score, score_of
from gymgate.stack import Stack

TASK = "gymgate/nemo_gym"
ROLLOUT_KEY = "nemo_gym"
"""Key of the rollout's record in the sample's store, and of the row's place in the sample's metadata."""

logger = logging.getLogger("gymgate.inspect")


def log(message: str) -> None:
    """Log a line of progress, which `--log-level info` shows."""
    logger.info("%s", message)


class _EvalHooks(Hooks):  # type: ignore[misc]
    """Starts the stack of an eval before its samples' time limits begin, and says below Inspect's results what the score is
    made of."""

    def __init__(self) -> None:
        self._tasks = defaultdict[str, CollectedTasks](CollectedTasks)
        """By eval."""
        self._on_examples = set[str]()
        """Evals over example rows."""

    async def on_task_start(self, data: TaskStart) -> None:
        if data.spec.task_registry_name == TASK:
            with contextlib.suppress(Exception):  # its samples tell
                options = EvalOptions.model_validate(data.spec.task_args)
                if is_example([options.data]):
                    self._on_examples.add(data.eval_id)
                await stacks.stack_for(options.run_spec().stack, log)

    async def on_sample_end(self, data: SampleEnd) -> None:
        if ROLLOUT_KEY in data.sample.metadata:
            self._tasks[data.eval_id].add(score_of_sample(data.sample))

    async def on_run_end(self, data: RunEnd) -> None:
        for log in data.logs:
            if tasks := self._tasks.pop(log.eval.eval_id, None):
                account, count = Account.of(tasks.tasks.values(), tasks), tasks.counts.rollouts
                total = log.results.total_samples if log.results else count
                # A retry takes the others from the earlier log, and Inspect's results have all.
                now = f"{count} of {total} samples ran now: " if count < total else ""
                rows = total // (log.eval.config.epochs or 1)
                examples = f"; {example_note(rows)}" if log.eval.eval_id in self._on_examples else ""
                print(printable(f"{log.eval.task}: {now}{account}{examples}"), file=sys.stderr, flush=True)


def score_of_sample(sample: EvalSample) -> Score:
    """Return what is counted of a sample. One that ended without a rollout's record failed, or is unscored."""
    record: Mapping[str, Any] = sample.store.get(ROLLOUT_KEY) or {
        "status": "failed" if sample.error else None
    }
    error = record.get("error") or (sample.error and {"message": sample.error.message})
    names = ("status", "limit", "reward", "answer_found", "result")
    fields: dict[str, Any] = {name: record.get(name) for name in names}
    attempt = Attempt.model_construct(
        environment=sample.metadata[ROLLOUT_KEY]["environment"],
        row_key=str(sample.id),
        repeat=sample.epoch,
        error=StoredError.model_validate(error) if error else None,
        **fields,
    )
    return score_of(attempt)


@functools.cache
def _register_hook() -> None:
    """Register the hook once, when a task is made: Inspect announces hooks that it finds when it starts."""
    hooks("stack", "starts NeMo Gym's servers before the first sample, and says what the score is made of")(
        _EvalHooks
    )


@solver  # type: ignore[untyped-decorator]
def gym_agent(options: dict[str, Any]) -> Solver:
    """Run each sample's row with its NeMo Gym agent. `options` are those of the task `gymgate/nemo_gym`.

    The stack starts before the first sample and stops when the eval's event loop ends. A rollout without a result is an error of
    its sample: `RolloutFailed` in one line, or what Inspect's model raised.
    """
    chosen = EvalOptions.model_validate(options)
    spec = chosen.run_spec()
    _register_hook()

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        gym = state.metadata[ROLLOUT_KEY]
        stack = await stacks.stack_for(spec.stack, log)
        conversation = AgentState(messages=state.messages)
        try:
            async with _policies(stack, conversation) as (policy, judge):
                rollout = await stack.run(
                    state.metadata["row"],
                    policy=policy,
                    environment=gym["environment"],
                    agent=gym["agent"],
                    limits=spec.limits,
                    rollout_id=state.uuid,
                    judge_policy=judge,
                )
            state.store.set(ROLLOUT_KEY, record_of(rollout))
        finally:
            state.output = conversation.output or ModelOutput()
            state.messages = conversation.messages
        if reason := failure_of(rollout):
            raise RolloutFailed(reason)
        return state

    return solve


def record_of(rollout: Rollout) -> dict[str, Any]:
    """Return what the sample's store keeps of a rollout: everything but its calls, which are the transcript's events."""
    return rollout.model_dump(mode="json", exclude={"calls"}, exclude_none=True)


@contextlib.asynccontextmanager
async def _policies(
    stack: Stack, conversation: AgentState
) -> AsyncIterator[tuple[CallableEndpoint, CallableEndpoint]]:
    """Yield the endpoints of the policy and of judges that are the policy's model.

    Those judges have a separate bridge, so that their calls are not taken for the agent's conversation. Raises what Inspect's
    model raised, not wrapped in a group.
    """
    async with contextlib.AsyncExitStack() as exits:
        group = await exits.enter_async_context(task_group())
        await exits.enter_async_context(bridged(AgentState(messages=[])))
        judge = _register(stack, InspectPolicy(group), exits)
        await exits.enter_async_context(bridged(conversation))
        yield _register(stack, InspectPolicy(group), exits), judge


def _register(stack: Stack, policy: InspectPolicy, exits: contextlib.AsyncExitStack) -> CallableEndpoint:
    name = f"inspect-{secrets.token_hex(8)}"
    exits.callback(stack.unregister, name)
    return stack.register(name, policy, dialect="responses")
