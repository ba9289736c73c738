"""The harness: hands the row to its Gym agent, whose model calls come back through verifiers."""

from __future__ import annotations

from typing import Any, ClassVar

import verifiers.v1 as vf
from pydantic import SecretStr
from verifiers.v1.configs.client import resolve_api_key, resolve_headers
from verifiers.v1.runtimes import Runtime

from gymgate.config import HTTPEndpoint
from gymgate.errors import StackLostError
from gymgate.integrations.verifiers import leases
from gymgate.integrations.verifiers.requirement import PLUGIN_ID
from gymgate.integrations.verifiers.task import GymRun, NeMoGymData, record, with_system_prompt
from gymgate.rollout import Rollout, outcome_of


class RolloutFailed(RuntimeError):
    """A rollout that Gym gave no score; the message is one line that says whose fault it was."""


class NeMoGymHarnessConfig(vf.HarnessConfig):
    """Nothing to set: the knobs are the taskset's (`--env.taskset.*`)."""

    id: str = PLUGIN_ID


class NeMoGymHarness(vf.Harness[NeMoGymHarnessConfig]):
    """Runs one task in the Gym stack that the task names.

    The agent's policy calls go to this rollout's own interception endpoint, through gymgate's gateway; nothing
    of NeMo Gym runs in this process or in verifiers' runtime.
    """

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace[Any],
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run the rollout and leave Gym's result on the trace; `RolloutFailed` if Gym gave none."""
        if not isinstance(data, NeMoGymData):
            raise TypeError(f"the nemo-gym-env harness runs nemo-gym-env tasks, not {type(data).__name__}")
        run = data.gym
        row = data.row if data.system_prompt is None else with_system_prompt(data.row, data.system_prompt)
        stack = await leases.stack_for(run.stack)
        try:
            rollout = await stack.run(
                row,
                policy=_policy(run, ctx.model, endpoint, secret),
                environment=run.environment,
                agent=run.agent,
                limits=run.limits,
                rollout_id=trace.id,
                record_bodies=False,
                judge_policy=_judge_policy(run, ctx),
            )
        except StackLostError:
            await leases.forget(run.stack, stack)
            raise
        record(trace, rollout)
        if rollout.limit == "max_calls":
            trace.stop("max_turns")  # what verifiers counts as truncated
        if reason := failure_of(rollout):
            raise RolloutFailed(reason)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _policy(run: GymRun, model: str, endpoint: str, secret: str) -> HTTPEndpoint:
    """The rollout's interception endpoint. Retries are verifiers' business: an unmarked one would be a new turn."""
    return HTTPEndpoint(
        base_url=endpoint,
        dialect=run.dialect,
        model=model,
        api_key=SecretStr(secret),
        timeout_s=run.limits.timeout_s,
        max_retries=0,
    )


def _judge_policy(run: GymRun, ctx: vf.ModelContext) -> HTTPEndpoint:
    """The run's own endpoint, past the interception: where a judge is the policy's model, its calls are no turns.

    Key and headers are resolved as verifiers' own client resolves them.
    """
    client = ctx.client
    return HTTPEndpoint(
        base_url=client.base_url,
        dialect=run.dialect,
        model=ctx.model,
        api_key=SecretStr(resolve_api_key(client)),
        headers=tuple(resolve_headers(client).items()),
        timeout_s=run.limits.timeout_s,
    )


def failure_of(rollout: Rollout) -> str | None:
    """One line on why the rollout failed; `None` if it did not."""
    if outcome_of(rollout).reason != "failed":
        return None
    error = rollout.error
    what = "gave no result" if error is None else f"{error.kind}: {error.message}"
    return " ".join(f"[{rollout.environment}] {what}".split())
