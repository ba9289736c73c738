"""Shape: how many rows and recorded rollouts there are, how long they are, and how their rewards are distributed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from gymgate.quality.record.context import MeasurementContext
from gymgate.quality.sections import Shape

DIFFERENT = 10
"""Rewards that are counted each; more are counted in as many equal ranges."""


async def measure(context: MeasurementContext) -> Shape:
    recordings = [row.recording for row in context.recorded]
    turns = [len(recording.steps) for recording in recordings if recording.steps]
    calls = [recording.tool_calls for recording in recordings if recording.steps]
    usages = [usage for recording in recordings if isinstance(usage := recording.response.get("usage"), dict)]
    tokens = {
        name: [usage[name] for usage in usages if isinstance(usage.get(name), int)]
        for name in ("input_tokens", "output_tokens")
    }
    rewards = [recording.reward for recording in recordings if recording.reward is not None]
    missing: dict[str, str] = {}
    if not turns:
        missing |= dict.fromkeys(("turns", "most_turns", "tool_calls"), "no recorded rollout")
    missing |= {name: "no recorded rollout says it" for name, counts in tokens.items() if not counts}
    if not rewards:
        missing |= dict.fromkeys(("reward_mean", "reward_deviation"), "no recorded reward")
    elif len(rewards) == 1:
        missing["reward_deviation"] = "a single recorded reward"
    return Shape(
        rows=len(context.rows),
        recordings=len(recordings),
        turns=_mean(turns),
        most_turns=max(turns, default=None),
        tool_calls=_mean(calls),
        input_tokens=_mean(tokens["input_tokens"]),
        output_tokens=_mean(tokens["output_tokens"]),
        rewards=distribution(rewards),
        reward_mean=round(statistics.fmean(rewards), 6) if rewards else None,
        reward_deviation=round(statistics.stdev(rewards), 6) if len(rewards) > 1 else None,
        missing=missing,
    )


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 2) if values else None


def distribution(rewards: Sequence[float]) -> dict[str, int]:
    """How often each reward was given, lowest first; in ten equal ranges if more than ten are different."""
    counts = Counter(rewards)
    if len(counts) <= DIFFERENT:
        return {f"{reward:g}": counts[reward] for reward in sorted(counts)}
    low, high = min(rewards), max(rewards)
    width = (high - low) / DIFFERENT
    ranges = Counter(min(int((reward - low) / width), DIFFERENT - 1) for reward in rewards)
    return {f"{low + n * width:.4g} to {low + (n + 1) * width:.4g}": ranges[n] for n in range(DIFFERENT)}
