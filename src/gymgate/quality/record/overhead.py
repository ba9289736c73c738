"""Cost: time to be ready and to verify, memory, and CPU time, without the policy's."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from gymgate.gym.inside.forkserver import descendants, proportional_bytes
from gymgate.quality.record.context import MeasurementContext, ReplayCase
from gymgate.quality.record.deterministic import JUDGED
from gymgate.quality.record.schema import Cost
from gymgate.rollouts import ModelCall, Rollout
from gymgate.stack.hangs import ticks_of

ALONE = 30
"""Rollouts one at a time, for the times."""
ALONE_S = 30.0
TOGETHER = 32
MEMORY_POLL_S = 0.25


async def measure(context: MeasurementContext) -> Cost:
    pids = (await context.stack.status())["fork_servers"]
    rest = await asyncio.to_thread(_megabytes, pids)
    ready = Cost(ready_s=round(context.ready_s, 2), rest_mb=rest)
    alone = await _alone(context, context.replays)
    verifying = sorted(
        (rollout.timing.total_s - max(map(_ended, rollout.policy_calls))) * 1000
        for rollout in alone
        if rollout.error is None and rollout.policy_calls
    )
    tools = [ms for rollout in alone for ms in _tool_calls_ms(rollout)]
    missing = {}
    if not verifying:
        missing["verification_ms"] = "no rollout ended with a reward"
    if not tools:
        missing["tool_call_ms"] = "no rollout calls a tool"
    times: dict[str, float] = {"verifications": len(verifying), "tool_calls": len(tools)}
    if verifying:
        times["verification_ms"] = round(statistics.median(verifying), 2)
        times["verification_p99_ms"] = round(verifying[math.ceil(0.99 * len(verifying)) - 1], 2)
    if tools:
        times["tool_call_ms"] = round(statistics.median(tools), 2)
    if context.has_recorded_judge:
        missing |= {"busy_mb": JUDGED, "rollouts_per_core_s": JUDGED}
    else:
        times |= await _together(context, context.replays, pids)
    return ready.model_copy(update={**times, "missing": missing})


async def _alone(context: MeasurementContext, replays: Sequence[ReplayCase]) -> list[Rollout]:
    rollouts: list[Rollout] = []
    began = time.monotonic()
    for n in range(ALONE):
        rollouts.append(await context.run(replays[n % len(replays)]))
        if time.monotonic() - began > ALONE_S:
            break
    return rollouts


async def _together(
    context: MeasurementContext, replays: Sequence[ReplayCase], pids: Sequence[int]
) -> dict[str, float]:
    """The most memory, and the CPU time, of 32 rollouts at once."""
    several = [replays[n % len(replays)] for n in range(TOGETHER)]
    used = _processor_s(pids)
    running = asyncio.create_task(context.run_all(several, TOGETHER))
    most = 0.0
    try:
        while not running.done():
            most = max(most, await asyncio.to_thread(_megabytes, pids))
            await asyncio.wait([running], timeout=MEMORY_POLL_S)
    finally:
        running.cancel()
    rollouts = [rollout for rollout in running.result() if rollout.error is None]
    seconds = _processor_s(pids) - used
    found = {"busy_mb": most}
    if rollouts and seconds > 0:
        found["rollouts_per_core_s"] = float(f"{len(rollouts) / seconds:.3g}")
    return found


def _tool_calls_ms(rollout: Rollout) -> Iterator[float]:
    """Milliseconds for each of its tool calls."""
    calls = rollout.policy_calls
    for call, following in pairwise(calls):
        answer = call.upstream_response or call.response or {}
        if count := sum(item.get("type") == "function_call" for item in answer.get("output") or []):
            yield from [(following.started_s - _ended(call)) * 1000 / count] * count


def _ended(call: ModelCall) -> float:
    return call.started_s + call.duration_s


def _megabytes(pids: Sequence[int]) -> float:
    family = [each for pid in pids for each in (pid, *descendants(pid))]
    return round(proportional_bytes(family) / 1e6, 1)


def _processor_s(pids: Sequence[int]) -> float:
    """Seconds of CPU time of the processes and of what they started."""
    return sum(map(ticks_of, pids)) / os.sysconf("SC_CLK_TCK")
