"""Rows of NeMo Gym environments as verifiers tasks: read lazily, scored by NeMo Gym."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import orjson
import verifiers.v1 as vf
from pydantic import BaseModel, ConfigDict
from verifiers.v1.dialects import ChatDialect, ResponsesDialect

from gymgate.catalog import Environment
from gymgate.config import POLICY, RolloutLimits, StackConfig
from gymgate.dataset import Row, open_rows
from gymgate.errors import DataError, GymgateError
from gymgate.gateway.dialects import translate_request
from gymgate.integrations.verifiers.knobs import PLUGIN_ID, Knobs
from gymgate.integrations.verifiers.stacks import log
from gymgate.rollout import ModelCall, Rollout, outcome_of

INFO_KEY = "nemo_gym"
REWARD = "reward"
UNSCORED = "nemo_gym/unscored"


class NeMoGymConfig(Knobs, vf.TasksetConfig):
    """The taskset's config: `--env.taskset.*`, `[env.taskset]`, `load_environment(**knobs)`."""

    id: str = PLUGIN_ID


class GymRun(BaseModel):
    """How to run a row. It travels with the task, so that a worker that never loads data can run it."""

    model_config = ConfigDict(frozen=True)

    environment: str
    agent: str | None = None
    stack: StackConfig
    limits: RolloutLimits = RolloutLimits()
    dialect: Literal["chat", "responses"] = "chat"


class NeMoGymData(vf.TaskData):
    """A row, verbatim, with the prompt that its agent opens with."""

    row: dict[str, Any]
    gym: GymRun


class NeMoGymTask(vf.Task[NeMoGymData, vf.State, vf.TaskConfig]):
    """Scored by NeMo Gym: the reward is read from the result that the harness left on the trace."""

    @property
    def key(self) -> str:
        """The environment and the row's content; other knobs and file names do not change it."""
        return self.data.id or self.hash

    @vf.reward(weight=1.0)
    async def gym(self, trace: vf.Trace[Any]) -> dict[str, float]:
        """Return NeMo Gym's reward; its parts are recorded with weight 0.

        A rollout that verifiers stopped or timed out has no result, and NeMo Gym masks one whose reward measures
        nothing. Then the reward stays `None`, which verifiers reads as "not scored", and `nemo_gym/unscored` is 1.
        """
        result = trace.info.get(INFO_KEY) or {}
        reward = outcome_of(result).reward
        trace.record_metrics(result.get("metrics", {}))
        trace.record_metric(UNSCORED, float(reward is None))
        if reward is None:
            trace.rewards[REWARD] = None
            return {}
        for name, value in result.get("reward_parts", {}).items():
            trace.record_reward(name, value, weight=0.0)
        return {REWARD: reward}


class NeMoGymTaskset(vf.Taskset[NeMoGymTask, NeMoGymConfig]):
    """A task per row, in the order of the file."""

    def load(self) -> Iterator[NeMoGymTask]:
        """Yield the tasks; raises `ConfigError` or `DataError`, one line, for what cannot be loaded."""
        config = self.config
        stack, limits = config.stack_config(), config.limits()
        seen: Counter[str] = Counter()
        for environment, row in itertools.islice(_rows(config), config.tasks):
            seen[identity := f"{environment}/{row.key}"] += 1
            data = NeMoGymData(
                id=identity if seen[identity] == 1 else f"{identity}#{seen[identity]}",
                name=f"{environment}:{row.line}",
                prompt=_prompt(row, config.dialect),
                row=_json_safe(row),
                gym=GymRun(
                    environment=environment,
                    agent=row.agent or config.agent,
                    stack=stack,
                    limits=limits,
                    dialect=config.dialect,
                ),
            )
            yield NeMoGymTask(data, config.task)

    def select(self, config: vf.SelectConfig) -> Self:
        """Return the tasks of a run: those asked for, else one of the default environment's or all of another's."""
        view = super().select(config)
        asked = config.limit is not None or not config.include.empty
        return view if asked or not self.config.is_demonstration else view.take(1)


def record(trace: vf.Trace[Any], rollout: Rollout) -> None:
    """Leave the rollout on the trace, JSON-serialisable: NeMo Gym's full result, and what `NeMoGymTask.gym` reads."""
    trace.info[INFO_KEY] = rollout.model_dump(mode="json", exclude={"calls"}, exclude_none=True)
    if not outcome_of(rollout, score_truncated=True).trained:  # verifiers' trainers decide on truncated ones
        trace.agent.trainable = False
    trace.extra_usage.extend(judge_usage(rollout))


def judge_usage(rollout: Rollout) -> list[vf.Usage]:
    """Return the token usage of the calls that were not the policy's."""
    judged = (usage_of(call) for call in rollout.calls if call.model_server != POLICY)
    return [usage for usage in judged if usage is not None]


def usage_of(call: ModelCall) -> vf.Usage | None:
    """Return the token usage of a call; `None` where its endpoint did not count the tokens."""
    counts = call.usage
    if counts.input_tokens is None or counts.output_tokens is None:
        return None
    return vf.Usage(
        prompt_tokens=counts.input_tokens - (counts.cached_tokens or 0),
        completion_tokens=counts.output_tokens,
        cached_input_tokens=counts.cached_tokens,
        reasoning_tokens=counts.reasoning_tokens,
    )


def _rows(config: Knobs) -> Iterator[tuple[str, Row]]:
    """Yield each row with the environment that runs it. Packaged data is read for each environment in turn."""
    environments = config.find_environments(log)
    agents = {
        agent.name: name
        for name, found in environments.items()
        for agent in found.config(config.config).agents
    }
    blended = config.data.startswith("hf:") or os.sep in config.data or Path(config.data).exists()
    if len(environments) > 1 and blended:
        for row in open_rows(config.data, environment=None):
            yield agents.get(row.agent or "") or _refuse(row, environments, agents), row
        return
    for name, environment in environments.items():
        for row in open_rows(config.data, environment=environment):
            own = name if row.agent is None else agents.get(row.agent)
            yield own or _refuse(row, environments, agents), row


def _refuse(row: Row, environments: Mapping[str, Environment], agents: Mapping[str, str]) -> NoReturn:
    """Raise `DataError` for a row whose agent the stack does not have; names a config that has it, if there is one."""
    if row.agent is None:
        raise _error(row, "has no agent_ref, so it could go to any of several environments")
    others = (
        config.name
        for environment in environments.values()
        for config in environment.configs
        if any(agent.name == row.agent for agent in config.agents)
    )
    other = next(others, None)
    hint = f"it is in config {other!r}" if other else f"the stack has {', '.join(sorted(agents))}"
    raise _error(row, f"agent {row.agent!r} is not in the stack; {hint}")


def _error(row: Row, reason: str) -> DataError:
    return DataError(f"{row.source}:{row.line}: {reason}", path=row.source, line=row.line)


def _prompt(row: Row, dialect: str) -> vf.Messages:
    """Return the messages that the agent opens with, as verifiers will parse them from the first call in that dialect."""
    params = row.data["responses_create_params"]
    if dialect == "chat":
        try:
            body = translate_request({"model": "policy", **params}, "responses", "chat")
            return ChatDialect().parse_request(body).messages
        except GymgateError:  # the rollout will report it; other rows can be read
            pass
    return ResponsesDialect().parse_request(params).messages


def _json_safe(row: Row) -> dict[str, Any]:
    """Return the row as JSON would carry it: tasks cross processes and are saved with the run."""
    try:
        safe: dict[str, Any] = orjson.loads(orjson.dumps(row.data, option=orjson.OPT_SERIALIZE_NUMPY))
    except orjson.JSONEncodeError as error:
        raise _error(row, f"cannot be written as JSON: {error}") from None
    return safe
