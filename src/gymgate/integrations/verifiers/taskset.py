"""Rows of NeMo Gym environments as verifiers tasks: read lazily, scored by NeMo Gym, counted as gymgate counts rollouts."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from typing import Any, Literal, Self

import verifiers.v1 as vf
from pydantic import BaseModel, ConfigDict
from verifiers.v1.dialects import ChatDialect, ResponsesDialect
from verifiers.v1.episode import Episode

from gymgate.core.config import POLICY, RolloutLimits, StackConfig
from gymgate.core.errors import GymgateError, printable
from gymgate.gateway.dialects import translate_request
from gymgate.integrations.eval_options import EvalOptions
from gymgate.integrations.eval_rows import eval_rows, json_safe
from gymgate.integrations.verifiers import PLUGIN_ID
from gymgate.rollouts import ModelCall, Rollout, Row, outcome_of
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.stored.attempts import Attempt, StoredError
from gymgate.runs.stored.score import score_of

INFO_KEY = "nemo_gym"
REWARD = "reward"
UNSCORED = "nemo_gym/unscored"

logger = logging.getLogger("verifiers.v1.gymgate")
"""Below verifiers' own logger: only its records reach the console and eval.log."""


def log(message: str) -> None:
    """Log a progress message; also print it on a terminal where verifiers' dashboard keeps the log off it."""
    logger.info("%s", message)
    if logging.lastResort is None and sys.stderr.isatty():
        print(printable(message), file=sys.stderr, flush=True)


class NeMoGymConfig(EvalOptions, vf.TasksetConfig):
    """The taskset's config: `--env.taskset.*`, `[env.taskset]`, `load_environment(**settings)`.

    Without `rows` and `-n`, the default environment's example rows give one task: `-r 100` is 100 rollouts of it.
    """

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
        """The environment and the row's content; other settings and file names do not change it."""
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
        spec = config.run_spec()
        for item in eval_rows(config, log):
            row = item.row
            data = NeMoGymData(
                id=item.id,
                name=item.name,
                prompt=_prompt(row, config.dialect),
                row=json_safe(row),
                gym=GymRun(
                    environment=item.environment,
                    agent=row.agent or config.agent,
                    stack=spec.stack,
                    limits=spec.limits,
                    dialect=config.dialect,
                ),
            )
            yield NeMoGymTask(data, config.task)

    def select(self, config: vf.SelectConfig) -> Self:
        """Return the tasks of a run: those asked for, else one of the default environment's or all of another's."""
        view = super().select(config)
        asked = config.limit is not None or not config.include.empty
        return view if asked or not self.config.is_demonstration else view.take(1)


def store_result(trace: vf.Trace[Any], rollout: Rollout) -> None:
    """Leave the rollout on the trace, JSON-serialisable: NeMo Gym's full result, and what `NeMoGymTask.gym` reads."""
    trace.info[INFO_KEY] = rollout.model_dump(mode="json", exclude={"calls"}, exclude_none=True)
    if not outcome_of(rollout, score_truncated=True).trained:  # verifiers' trainers decide on truncated ones
        trace.agent.trainable = False
    trace.extra_usage.extend(judge_usage(rollout))


def add_episode(tasks: CollectedTasks, episode: Episode[Any, Any, Any]) -> str:
    """Count an episode as gymgate counts rollouts; return its environment."""
    data = episode.task.data.model_dump(mode="json", include={"id", "idx", "name", "gym"})
    name = (data.get("gym") or {}).get("environment") or episode.env.id or "?"
    row_key = str(data.get("id") or data.get("idx"))
    line = str(data.get("name")).rpartition(":")[2]  # a task's name is ENVIRONMENT:LINE
    # Other errors of the episode are those of attempts that were made again.
    for error in episode.errors[-1:] if not episode.ok and all(trace.ok for trace in episode.traces) else ():
        tasks.counts.add_cause(f"{error.type}: {error.message}")
    traces: list[vf.Trace[Any] | None] = [*episode.traces]
    for trace in traces or [None]:
        rollout: dict[str, Any] = {"status": "failed"} if trace is None else _rollout(trace)
        rollout |= {"line": int(line) if line.isdecimal() else 0, "repeat": tasks.counts.rollouts}
        tasks.add(score_of(Attempt.model_construct(environment=name, row_key=row_key, **rollout)))
    return name


def _rollout(trace: vf.Trace[Any]) -> dict[str, Any]:
    """Return status and reward of a trace, as a line of a run has them; parts of a reward have weight 0."""
    rollout = (trace.info.get(INFO_KEY) or {"status": "completed"}) if trace.ok else {"status": "failed"}
    if rollout.get("status") == "failed":
        last = trace.errors[-1] if trace.errors else None
        known = (trace.info.get(INFO_KEY) or {}).get("error") or {}
        kinds = {name: known[name] for name in ("kind", "judge") if name in known}
        error = last and StoredError.model_construct(type=last.type, message=last.message, **kinds)
        return {"status": "failed", "error": error}
    weighted = [reward.value for reward in trace.rewards.values() if reward and reward.weight]
    fields = {name: rollout.get(name) for name in ("status", "limit", "answer_found", "result")}
    return {**fields, "reward": math.fsum(weighted) if weighted else None}


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
