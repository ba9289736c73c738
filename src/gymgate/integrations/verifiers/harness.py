"""The harness and the env: the env holds the stack's lease, the harness hands each row to its NeMo Gym agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import verifiers.v1 as vf
from pydantic import SecretStr, ValidationError
from verifiers.v1.configs.client import resolve_api_key, resolve_headers
from verifiers.v1.runtimes import Runtime

from gymgate.core.config import HTTPEndpoint, StackConfig, validation_message
from gymgate.core.errors import ConfigError
from gymgate.integrations import stacks
from gymgate.integrations.eval_options import DEFAULT_ENVIRONMENT
from gymgate.integrations.failures import RolloutFailed, failure_of
from gymgate.integrations.verifiers import PLUGIN_ID
from gymgate.integrations.verifiers.taskset import (
    GymRun,
    NeMoGymConfig,
    NeMoGymData,
    add_episode,
    log,
    store_result,
)
from gymgate.rollouts.row import input_items
from gymgate.runs.counted.account import Account
from gymgate.runs.counted.tasks import CollectedTasks


class NeMoGymHarnessConfig(vf.HarnessConfig):
    """Has no settings: they are the taskset's (`--env.taskset.*`)."""

    id: str = PLUGIN_ID


class NeMoGymHarness(vf.Harness[NeMoGymHarnessConfig]):
    """Runs one task in the stack that the task names.

    The agent's policy calls go through gymgate's gateway to this rollout's own interception endpoint; nothing of NeMo
    Gym runs in this process or in verifiers' runtime.
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
        """Run the rollout and leave NeMo Gym's result on the trace; raises `RolloutFailed` if there is none."""
        if not isinstance(data, NeMoGymData):
            raise TypeError(f"the nemo-gym-env harness runs nemo-gym-env tasks, not {type(data).__name__}")
        run = data.gym
        row = data.row if data.system_prompt is None else with_system_prompt(data.row, data.system_prompt)
        stack = await stacks.stack_for(run.stack, log)
        if ctx.client.type == "train":
            stack.refuse_training(run.environment)
        rollout = await stack.run(
            row,
            policy=_policy(run, ctx.model, endpoint, secret),
            environment=run.environment,
            agent=run.agent,
            limits=run.limits,
            rollout_id=trace.id,
            judge_policy=_judge_policy(run, ctx),
        )
        store_result(trace, rollout)
        if rollout.limit == "max_calls":
            trace.stop("max_turns")  # what verifiers counts as truncated
        if reason := failure_of(rollout):
            raise RolloutFailed(reason)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class NeMoGymEnvConfig(vf.SingleAgentEnvConfig):
    """The single-agent env with the local runtime: nothing of a rollout runs in it."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class NeMoGymEnv(vf.SingleAgentEnv, vf.Env[NeMoGymEnvConfig]):
    """One NeMo Gym agent per task. The stack is up before the first rollout and stops after the last; then an eval's log says
    what its score is made of."""

    _held: StackConfig | None = None
    _tasks: CollectedTasks | None = None

    async def start(self) -> None:
        """Start the stack, or join one that is up; raises the stack's error, one line, if that fails."""
        config = self.taskset.config
        if not isinstance(config, NeMoGymConfig):
            raise TypeError(f"nemo-gym-env runs its own taskset, not {type(self.taskset).__name__}")
        self._held = config.run_spec().stack
        await stacks.hold(self._held, log)

    async def run_slot(self, slot: Any, ctx: vf.ModelContext, *args: Any, **options: Any) -> Any:
        """Run an episode, and count it if it is of an eval."""
        episode = await super().run_slot(slot, ctx, *args, **options)
        if ctx.client.type != "train":
            self._tasks = self._tasks or CollectedTasks()
            add_episode(self._tasks, episode)
        return episode

    async def stop(self) -> None:
        """Release the lease, also after a start that failed or was cancelled."""
        held, self._held = self._held, None
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            log(f"ran now: {Account.of(tasks.tasks.values(), tasks)}")
        if held is not None:
            await stacks.release(held)


def load_environment(
    env: str | list[str] = DEFAULT_ENVIRONMENT,
    *,
    env_config: Mapping[str, Any] | None = None,
    **config: Any,
) -> vf.Env[Any]:
    """Return a verifiers env for a trainer: `load_environment(env="mcqa", data="train.jsonl", max_calls=20)`.

    `config` are the taskset's settings (`NeMoGymConfig`); `env_config` is the rest of verifiers' `[env]` block
    (`{"agent": {"max_turns": 8}, "retries": ...}`). Installs nemo-gym if it is not there. Raises `ConfigError`, with
    similar names, for an unknown environment.
    """
    try:
        taskset = NeMoGymConfig(env=env, **config)
    except ValidationError as error:
        raise ConfigError(f"load_environment: {validation_message(error)}") from None
    taskset.find_environments(log)
    return vf.load_environment(
        vf.resolve_env_config({**(env_config or {}), "taskset": {**taskset.model_dump(), "id": PLUGIN_ID}})
    )


def with_system_prompt(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the row with `text` as its system message, in place of one that it opens with."""
    params = dict(row["responses_create_params"])
    messages = input_items(params)
    if messages and messages[0].get("role") in ("system", "developer"):
        messages = messages[1:]
    params["input"] = [{"role": "system", "content": text}, *messages]
    return {**row, "responses_create_params": params}


def _policy(run: GymRun, model: str, endpoint: str, secret: str) -> HTTPEndpoint:
    """Return the rollout's interception endpoint.

    A retry bears its call's `Idempotency-Key`, by which verifiers takes both for one turn.
    """
    return HTTPEndpoint(
        base_url=endpoint,
        dialect=run.dialect,
        model=model,
        api_key=SecretStr(secret),
        timeout_s=run.limits.timeout_s,
    )


def _judge_policy(run: GymRun, ctx: vf.ModelContext) -> HTTPEndpoint:
    """Return the eval's own endpoint: a judge that is the policy's model bypasses the interception, so it adds no turns.

    Key and headers are resolved as verifiers' own client resolves them.
    """
    client = ctx.client
    return HTTPEndpoint(
        base_url=client.base_url,
        dialect=run.dialect,
        model=ctx.model,
        api_key=SecretStr(resolve_api_key(client)),
        headers=tuple((name, SecretStr(value)) for name, value in resolve_headers(client).items()),
        timeout_s=run.limits.timeout_s,
    )
