"""Collected rollouts written as ATIF trajectories, the Agent Trajectory Interchange Format of Harbor, a file each."""

from __future__ import annotations

import contextlib
import hashlib
import mimetypes
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gymgate.core import codec
from gymgate.core.files import filling
from gymgate.rollouts import ModelCall, outcome_of
from gymgate.rollouts.record import UNDELIVERED
from gymgate.rollouts.transcript import items_of, text_of
from gymgate.runs.counted.aggregate import RunTable
from gymgate.runs.stored.gym_rollouts import ROLLOUT, TASK, RolloutNumbers
from gymgate.runs.stored.record import CollectedRollout
from gymgate.runs.stored.rows import RowReader

SCHEMA = "ATIF-v1.7"
MANIFEST = "manifest.jsonl"
"""Lists the rollouts that NeMo Gym's `gym eval reverify --input-format atif` can score: failed ones have no answer."""
IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
"""The types of images that the format has."""
_PLACE_AND_END = {
    *("environment", "row_key", "occurrence", "repeat", "seed", "task", "source", "line", "attempt"),
    *("status", "limit", "metrics", "error", "timing", "finished"),
}

Step = dict[str, Any]


def export_trajectories(table: RunTable, output: Path) -> int:
    """Write a directory with a trajectory for each rollout, those that failed permanently included; returns how many.

    A file is called `TASK-ROLLOUT.json`, with the numbers that `export_rollouts` gives the same rollout. Raises
    `ConfigError` if `output` is there already, `DataError` if it cannot be written.
    """
    numbering, rows, count = RolloutNumbers(table), RowReader(), 0
    versions = {str(run.settings["nemo_gym"]) for run in table.runs if "nemo_gym" in run.settings}
    agent = {
        "version": ", ".join(sorted(versions)) or "unknown",
        "model_name": (table.policy or {}).get("model"),
    }
    with filling(output) as directory, (directory / MANIFEST).open("wb") as manifest:
        for attempt in table.rollouts(failed=True):
            rollout, numbers = attempt.rollout(), numbering.of(attempt)
            row = rows.read_if_there(rollout) if rollout.result is None else {}
            trajectory = trajectory_of(rollout, agent, row)
            written = codec.dumps(trajectory) + b"\n"
            path = directory / f"{numbers[TASK]}-{numbers[ROLLOUT]}.json"
            path.write_bytes(written)
            if rollout.error is None and any(step["source"] == "agent" for step in trajectory["steps"]):
                entry = {"trajectory_path": path.name, "expected_sha256": hashlib.sha256(written).hexdigest()}
                manifest.write(codec.dumps(entry | numbers) + b"\n")
            count += 1
    return count


def trajectory_of(
    rollout: CollectedRollout, agent: Mapping[str, Any], row: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return a rollout as a trajectory; `row` is its input, for one without a result.

    `agent` has the version and the model. Only what was measured is a number: `reward` is null in `extra` where it does
    not count, and steps have the metrics of the model's calls if there is one call for each.
    """
    result = rollout.result or row
    params = result.get("responses_create_params")
    params = params if isinstance(params, Mapping) else {}
    prompt, answered = items_of(result)
    trajectory = Trajectory()
    if isinstance(params.get("instructions"), str):
        trajectory.add({"role": "system", "content": params["instructions"]}, copied=True)
    for item in prompt:
        trajectory.add(item, copied=True)
    for item in answered:
        trajectory.add(item)
    calls = [call for call in rollout.policy_calls if call.error is None and UNDELIVERED not in call.details]
    _measure(rollout, trajectory.sampled, calls)
    steps = trajectory.steps
    if not steps:  # the format wants one
        error = rollout.error
        why = f"{error.type}: {error.message}" if error else f"{rollout.status}, without a result"
        steps = [{"source": "system", "message": why}]
    totals = {
        "total_prompt_tokens": _sum(call.usage.input_tokens for call in calls),
        "total_completion_tokens": _sum(call.usage.output_tokens for call in calls),
        "total_cached_tokens": _sum(call.usage.cached_tokens for call in calls),
    }
    return {
        "schema_version": SCHEMA,
        "session_id": rollout.id,
        "trajectory_id": rollout.id,
        "agent": _known({"name": rollout.agent, **agent, "tool_definitions": params.get("tools") or None}),
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {**_known(totals), "total_steps": len(steps)},
        "extra": {"gymgate": _extra(rollout)},
    }


def _extra(rollout: CollectedRollout) -> dict[str, Any]:
    """Return what the format has no field for."""
    outcome = outcome_of(rollout)
    return {
        "version": metadata.version("gymgate"),
        **rollout.model_dump(mode="json", include=_PLACE_AND_END),
        "outcome": outcome.reason,
        "reward": outcome.reward,
        "reward_parts": rollout.reward_parts if outcome.counted else {},
    }


class Trajectory:
    """The steps of a trajectory, made of the items of a Responses conversation.

    A step of the agent is what one answer of the model held (reasoning, then a message, then calls of tools) and, as its
    observation, the outputs of these calls.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.sampled: list[Step] = []
        """Those of the agent that are not of the row."""
        self._calling: dict[str, Step] = {}
        """The step of each tool call, by the call's id."""

    def add(self, item: Mapping[str, Any], *, copied: bool = False) -> None:
        """Add an item; `copied` is one of the row, which the agent did not make."""
        kind = str(item.get("type") or "message")
        if kind.endswith("_output"):
            self._observe(item)
        elif kind == "reasoning":
            step = self._agent_step(copied, before=("message", "tool_calls"))
            earlier = step.get("reasoning_content")
            text = text_of(item.get("content")) or text_of(item.get("summary"))
            step["reasoning_content"] = f"{earlier}\n{text}" if earlier else text
        elif kind.endswith("_call"):
            self._call(item, kind, copied)
        elif kind == "message" and item.get("role") in (None, "assistant"):
            self._agent_step(copied, before=("message", "tool_calls"))["message"] = content_of(
                item.get("content")
            )
        elif kind == "message":
            source = "user" if item["role"] == "user" else "system"
            self.steps.append({"source": source, "message": content_of(item.get("content"))})
        else:
            self.steps.append({"source": "system", "message": text_of(item), "extra": {"type": kind}})

    def _call(self, item: Mapping[str, Any], kind: str, copied: bool) -> None:
        step = self._agent_step(copied, before=())
        calls = step.setdefault("tool_calls", [])
        call_id = str(item.get("call_id") or item.get("id") or f"call_{len(self._calling) + 1}")
        name = str(item.get("name") or kind.removesuffix("_call"))
        calls.append({"tool_call_id": call_id, "function_name": name, "arguments": arguments_of(item)})
        self._calling[call_id] = step
        if item.get("output") is not None:  # of a tool that the endpoint itself ran
            self._observe({"call_id": call_id, "output": item["output"]})

    def _observe(self, item: Mapping[str, Any]) -> None:
        call_id = str(item.get("call_id"))
        step = self._calling.get(call_id)
        result: dict[str, Any] = {"source_call_id": call_id, "content": content_of(item.get("output"))}
        if step is None:  # its call is not in the conversation
            del result["source_call_id"]
            step = {"source": "system", "message": ""}
            self.steps.append(step)
        step.setdefault("observation", {"results": []})["results"].append(result)

    def _agent_step(self, copied: bool, before: Sequence[str]) -> Step:
        """Return the last step if it is the agent's and has neither an observation nor what comes after the next item."""
        last = self.steps[-1] if self.steps else {}
        is_open = last.get("source") == "agent" and bool(last.get("is_copied_context")) == copied
        if is_open and "observation" not in last and not any(last.get(name) for name in before):
            return last
        step: Step = {"source": "agent", "message": ""}
        self.steps.append(step)
        if copied:
            step["is_copied_context"] = True
        else:
            self.sampled.append(step)
        return step


def content_of(value: Any) -> str | list[dict[str, Any]]:
    """Return a message's content: a text, or its parts if they are several or hold an image."""
    if not isinstance(value, list):
        return text_of(value)
    parts = [_part(part) for part in value]
    if any(part["type"] == "image" for part in parts) or len(parts) > 1:
        return parts
    return parts[0]["text"] if parts else ""


def _part(value: Any) -> dict[str, Any]:
    image = value.get("image_url") if isinstance(value, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else image
    kind = None
    with contextlib.suppress(ValueError):  # from Python 3.13 on, for a URL with a broken host
        kind = mimetypes.guess_type(url)[0] if isinstance(url, str) else None
    if kind in IMAGES:
        return {"type": "image", "source": {"media_type": kind, "path": url}}
    return {"type": "text", "text": text_of(value)}


def arguments_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call's arguments; those that are no JSON object, as a model may write, are `raw_arguments`."""
    arguments: Any = next(
        (item[name] for name in ("arguments", "action", "input") if item.get(name) is not None), {}
    )
    value = arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            value = codec.loads(arguments.encode())
    return dict(value) if isinstance(value, Mapping) else {"raw_arguments": arguments}


def _measure(rollout: CollectedRollout, steps: Sequence[Step], calls: Sequence[ModelCall]) -> None:
    """Give each step the time and the token counts of its call, if there are as many steps as calls."""
    if len(steps) != len(calls):
        return
    begun = rollout.finished - rollout.timing.total_s
    for step, call in zip(steps, calls, strict=True):
        ended = datetime.fromtimestamp(begun + call.started_s + call.duration_s, UTC)
        usage = call.usage
        metrics = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "cached_tokens": usage.cached_tokens,
            "extra": _known({"reasoning_tokens": usage.reasoning_tokens}) or None,
        }
        step |= {
            "timestamp": ended.isoformat(),
            "llm_call_count": 1,
            **_known({"metrics": _known(metrics) or None}),
        }


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum; `None` if there is nothing to add, or one count is not known."""
    values = list(counts)
    return None if not values or None in values else sum(filter(None, values))
