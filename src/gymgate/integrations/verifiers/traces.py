"""Collected rollouts as verifiers' saved traces: what its viewers, its replay and prime-rl read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import TypeAdapter
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.dialects import ResponsesDialect
from verifiers.v1.episode import EnvInfo, Episode, GroupInfo
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import State
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, AgentSpan, ModelCall, Reward, TimeSpan, Timing, Trace, TraceTask

from gymgate.collection.dataset_export import read_rollouts
from gymgate.collection.record import CollectedRollout
from gymgate.errors import ConfigError, DataError
from gymgate.integrations.verifiers.requirement import PLUGIN_ID
from gymgate.integrations.verifiers.task import INFO_KEY, REWARD, UNSCORED, NeMoGymTask, judge_usage
from gymgate.rollout import ModelCall as Call
from gymgate.rollout import outcome_of

WireTrace = Trace[WireTaskData, State, WireAgentConfig]
WireEpisode = Episode[WireTaskData, State, WireAgentConfig]
_FINISH_REASONS = ("stop", "length", "tool_calls")


def export_traces(runs: Iterable[Path], output: Path) -> int:
    """Write an episode per finished rollout, as verifiers saves them (`traces.jsonl`); how many.

    `runs` are directories of runs, shards included, and files of NeMo Gym's rollouts. Raises `ConfigError` for another
    ending than .jsonl, `DataError` if the file cannot be written.
    """
    if output.suffix != ".jsonl":
        raise ConfigError(f"{output}: traces are JSONL; give it that ending")
    adapter = TypeAdapter(WireEpisode)
    scratch = output.with_name(f".{output.name}.new")
    count = 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            for value in read_rollouts(runs):
                file.write(adapter.dump_json(episode_of(value), exclude_none=True) + b"\n")
                count += 1
        scratch.replace(output)
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.strerror}", path=str(output)) from error
    return count


def episode_of(value: Mapping[str, Any]) -> WireEpisode:
    """A line of a run as an episode of one trace."""
    identity = f"{value['row_key']}-{value.get('repeat', 0)}-{value.get('seed')}"
    rollout = CollectedRollout.model_validate({"id": identity, **value})
    trace = trace_of(rollout)
    return WireEpisode(
        id=rollout.id,
        env=EnvInfo(id=PLUGIN_ID, name=rollout.environment),
        task=trace.task,
        group=GroupInfo(id=f"{trace.task.key}/{rollout.seed}"),
        ok=trace.ok,
        traces=[trace],
    )


def trace_of(rollout: CollectedRollout) -> WireTrace:
    """The conversation as one branch; rewards, metrics and Gym's result as the harness leaves them."""
    nodes = list(_nodes(rollout))
    result = outcome_of(rollout, score_truncated=True)  # verifiers' trainers decide on truncated ones
    trace = WireTrace(
        id=rollout.id,
        task=_task(rollout, [node.message for node in nodes if not node.sampled][:1]),
        agent=AgentInfo(config=WireAgentConfig(), trainable=result.trained),
        nodes=nodes,
        calls=_calls(rollout, nodes),
        extra_usage=judge_usage(rollout),
        is_completed=True,
        ok=result.reason != "failed",
        stop_condition="max_turns" if rollout.status == "truncated" else "agent_completed",
        timing=_timing(rollout),
    )
    trace.info[INFO_KEY] = rollout.model_dump(mode="json", exclude={"calls"}, exclude_none=True)
    parts = rollout.reward_parts if result.counted else {}
    trace.rewards = {name: Reward(score=part, weight=0.0) for name, part in parts.items()}
    trace.rewards[REWARD] = None if result.reward is None else Reward(score=result.reward)
    trace.metrics = {**rollout.metrics, UNSCORED: float(not result.counted)}
    return trace


def _task(rollout: CollectedRollout, opening: list[vf.Message]) -> TraceTask[WireTaskData]:
    key = f"{rollout.environment}/{rollout.row_key}"
    identity = f"{key}#{rollout.occurrence + 1}" if rollout.occurrence else key
    data = WireTaskData.model_validate(
        {
            "idx": rollout.task,
            "id": identity,
            "name": f"{rollout.environment}:{rollout.line}",
            "prompt": opening or None,
            "gym": {"environment": rollout.environment, "agent": rollout.agent},
        }
    )
    return TraceTask(type=NeMoGymTask.__name__, data=data, key=identity)


def _nodes(rollout: CollectedRollout) -> Iterator[MessageNode]:
    """What was said, each message after the one before it; what the policy wrote is marked as sampled."""
    result = rollout.result or {}
    asked = _items((result.get("responses_create_params") or {}).get("input"))
    answered = _items((result.get("response") or {}).get("output"))
    given = len(_messages(asked))
    for place, message in enumerate(_messages([*asked, *answered])):
        yield MessageNode(
            parent=place - 1 if place else None,
            message=message,
            sampled=place >= given and message.role == "assistant",
            timestamp=rollout.finished,
        )


def _items(items: Any) -> list[Any]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return items if isinstance(items, list) else []


def _messages(items: list[Any]) -> list[vf.Message]:
    return list(ResponsesDialect().parse_request({"model": "policy", "input": items}).messages)


def _calls(rollout: CollectedRollout, nodes: list[MessageNode]) -> list[ModelCall]:
    """The policy's calls; each with its node where there is one for each."""
    sampled: list[int | None] = [place for place, node in enumerate(nodes) if node.sampled]
    if len(sampled) != len(rollout.policy_calls):
        sampled = [None] * len(rollout.policy_calls)
    return [
        ModelCall(
            node=node,
            finish_reason=call.finish_reason if call.finish_reason in _FINISH_REASONS else None,
            usage=_usage(call),
            time=_span(rollout, call.started_s, call.duration_s),
        )
        for call, node in zip(rollout.policy_calls, sampled, strict=True)
    ]


def _usage(call: Call) -> vf.Usage | None:
    counts = call.usage
    if counts.input_tokens is None or counts.output_tokens is None:
        return None
    return vf.Usage(
        prompt_tokens=counts.input_tokens - (counts.cached_tokens or 0),
        completion_tokens=counts.output_tokens,
        cached_input_tokens=counts.cached_tokens,
        reasoning_tokens=counts.reasoning_tokens,
    )


def _timing(rollout: CollectedRollout) -> Timing:
    whole = _span(rollout, 0.0, rollout.timing.total_s)
    agent = AgentSpan(start=whole.start, end=whole.end)
    agent.model.duration = rollout.timing.model_s
    return Timing(start=whole.start, agent=agent)


def _span(rollout: CollectedRollout, start_s: float, seconds: float) -> TimeSpan:
    begun = rollout.finished - rollout.timing.total_s
    return TimeSpan(start=begun + start_s, end=begun + start_s + seconds)
