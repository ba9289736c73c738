"""Collected rollouts written as verifiers' saved traces, for its viewers, its replay and prime-rl."""

from __future__ import annotations

from collections.abc import Iterator
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

from gymgate.core.files import replacing
from gymgate.integrations.verifiers import PLUGIN_ID
from gymgate.integrations.verifiers.taskset import (
    REWARD,
    UNSCORED,
    NeMoGymTask,
    store_result,
    usage_of,
)
from gymgate.results.tables import checked_table
from gymgate.rollouts import outcome_of
from gymgate.rollouts.transcript import items_of
from gymgate.runs.counted.aggregate import RunTable
from gymgate.runs.stored.record import CollectedRollout

WireTrace = Trace[WireTaskData, State, WireAgentConfig]
WireEpisode = Episode[WireTaskData, State, WireAgentConfig]
_FINISH_REASONS = ("stop", "length", "tool_calls")


def export_traces(table: RunTable, output: Path) -> int:
    """Write an episode per finished rollout, as verifiers saves them (`traces.jsonl`); returns how many.

    Raises `ConfigError` for another suffix than .jsonl, `DataError` if the file cannot be written.
    """
    checked_table(output, (".jsonl",))
    adapter = TypeAdapter(WireEpisode)
    count = 0
    with replacing(output) as file:
        for attempt in table.rollouts():
            file.write(adapter.dump_json(episode_of(attempt.rollout()), exclude_none=True) + b"\n")
            count += 1
    return count


def episode_of(rollout: CollectedRollout) -> WireEpisode:
    """Return a rollout as an episode of one trace."""
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
    """Return the conversation as one branch, with rewards, metrics and result as the harness leaves them."""
    nodes = list(_nodes(rollout))
    result = outcome_of(rollout)
    whole = _span(rollout, 0.0, rollout.timing.total_s)
    agent = AgentSpan(start=whole.start, end=whole.end)
    agent.model.duration = rollout.timing.model_s
    trace = WireTrace(
        id=rollout.id,
        task=_task(rollout, [node.message for node in nodes if not node.sampled][:1]),
        agent=AgentInfo(config=WireAgentConfig()),
        nodes=nodes,
        calls=_calls(rollout, nodes),
        is_completed=True,
        ok=result.reason != "failed",
        stop_condition="max_turns" if rollout.status == "truncated" else "agent_completed",
        timing=Timing(start=whole.start, agent=agent),
    )
    store_result(trace, rollout)
    parts = rollout.reward_parts if result.counted else {}
    trace.rewards = {name: Reward(score=part, weight=0.0) for name, part in parts.items()}
    trace.rewards[REWARD] = None if result.reward is None else Reward(score=result.reward)
    trace.metrics = {**rollout.metrics, UNSCORED: float(not result.counted)}
    return trace


def _task(rollout: CollectedRollout, opening: list[vf.Message]) -> TraceTask[WireTaskData]:
    identity = str(rollout.task_key)
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
    """Yield the messages, each with the one before it as parent; the policy's own are marked as sampled."""
    asked, answered = items_of(rollout.result)
    asked_count = len(_messages(asked))
    for index, message in enumerate(_messages([*asked, *answered])):
        yield MessageNode(
            parent=index - 1 if index else None,
            message=message,
            sampled=index >= asked_count and message.role == "assistant",
            timestamp=rollout.finished,
        )


def _messages(items: list[Any]) -> list[vf.Message]:
    return list(ResponsesDialect().parse_request({"model": "policy", "input": items}).messages)


def _calls(rollout: CollectedRollout, nodes: list[MessageNode]) -> list[ModelCall]:
    """Return the policy's calls, each with its node if there are as many sampled nodes as calls."""
    sampled: list[int | None] = [index for index, node in enumerate(nodes) if node.sampled]
    if len(sampled) != len(rollout.policy_calls):
        sampled = [None] * len(rollout.policy_calls)
    return [
        ModelCall(
            node=node,
            finish_reason=call.finish_reason if call.finish_reason in _FINISH_REASONS else None,
            usage=usage_of(call),
            time=_span(rollout, call.started_s, call.duration_s),
        )
        for call, node in zip(rollout.policy_calls, sampled, strict=True)
    ]


def _span(rollout: CollectedRollout, start_s: float, seconds: float) -> TimeSpan:
    begun = rollout.finished - rollout.timing.total_s
    return TimeSpan(start=begun + start_s, end=begun + start_s + seconds)
