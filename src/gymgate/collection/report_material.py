"""What a report shows, gathered in one pass: numbers of every rollout, conversations of a few."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymgate.collection.aggregate import read_failures
from gymgate.collection.dataset_export import read_rollouts
from gymgate.collection.store import run_directories
from gymgate.config import POLICY
from gymgate.rollout import outcome_of

TIMES = ("waiting and set-up", "policy", "tools and agent", "judges", "scoring")


@dataclass
class Material:
    """What the charts and the viewer show; numbers of every rollout, conversations of a few."""

    rewards: array[float] = field(default_factory=lambda: array("d"))
    calls: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    split: Counter[str] = field(default_factory=Counter)
    shown: dict[tuple[str, str, int], list[dict[str, Any]]] = field(default_factory=dict)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)


def gather(runs: Iterable[Path], tasks: int, per_task: int) -> Material:
    """Of runs, shards included, and of files of NeMo Gym's rollouts; conversations of the first `tasks` tasks."""
    material = Material()
    for value in read_rollouts(runs):
        if (reward := outcome_of(value).reward) is not None:
            material.rewards.append(reward)
        calls = [call for call in value.get("calls") or () if call.get("model_server") == POLICY]
        material.calls.append(len(calls))
        material.tokens.append(sum((call.get("usage") or {}).get("output_tokens") or 0 for call in calls))
        _add_times(material, value)
        name = (str(value.get("environment")), str(value["row_key"]), int(value.get("occurrence", 0)))
        if name in material.shown or len(material.shown) < tasks:
            shown = material.shown.setdefault(name, [])
            if len(shown) < per_task:
                shown.append(value)
    for path in runs:
        for directory in run_directories(path) if path.is_dir() else (path,):
            for failure in read_failures(directory):
                error = failure.get("error") or {}
                kind = (str(error.get("kind")), str(error.get("type")))
                material.failures[kind] += 1
                material.examples.setdefault(kind, str(error.get("message")))
    return material


def _add_times(material: Material, value: Mapping[str, Any]) -> None:
    """Where a rollout's time went, as its calls to models divide it."""
    total = float((value.get("timing") or {}).get("total_s") or 0.0)
    if total <= 0:
        return
    material.seconds.append(total)
    for name, seconds in time_split(total, value.get("calls") or ()).items():
        material.split[name] += seconds  # type: ignore[assignment]


def time_split(total_s: float, calls: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a rollout, so that they add up to its total; overlapping calls count once, the earlier one first."""
    split = dict.fromkeys(TIMES, 0.0)
    reached, after = 0.0, "waiting and set-up"
    for call in sorted(calls, key=lambda call: float(call.get("started_s") or 0.0)):
        start = min(float(call.get("started_s") or 0.0), total_s)
        end = min(start + float(call.get("duration_s") or 0.0), total_s)
        split[after] += max(0.0, start - reached)
        kind = "policy" if call.get("model_server") == POLICY else "judges"
        split[kind] += max(0.0, end - max(start, reached))
        reached, after = max(reached, end), "tools and agent"
    split["scoring" if after != "waiting and set-up" else after] += max(0.0, total_s - reached)
    return split
