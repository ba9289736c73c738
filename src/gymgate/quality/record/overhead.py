"""Cost: time to be ready and to verify, memory, CPU time and open files, without the policy's, and what this machine carries."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from gymgate.gym.inside.forkserver import descendants, proportional_bytes, stat
from gymgate.quality.record.context import MeasurementContext, ReplayCase
from gymgate.quality.record.deterministic import JUDGED
from gymgate.quality.sections import Cost
from gymgate.rollouts import ModelCall, Rollout
from gymgate.stack.daemon.hangs import ticks_of

ALONE = 30
"""Rollouts one at a time, for the times."""
ALONE_S = 30.0
TOGETHER = 32
POLL_S = 0.25
TOGETHER_FIGURES = (
    "busy_mb",
    "rollouts_per_core_s",
    "most_rollouts_s",
    "limited_by",
    "rollout_mb",
    "rollout_files",
)


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
        missing |= dict.fromkeys(TOGETHER_FIGURES, JUDGED)
        return ready.model_copy(update={**times, "missing": missing})
    together = await _together(context, context.replays, pids)
    return ready.model_copy(update={**times, **together, "missing": missing})


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
) -> dict[str, float | str]:
    """What 32 rollouts at once use: the most memory and open files, and the CPU time."""
    several = [replays[n % len(replays)] for n in range(TOGETHER)]
    status = await context.stack.status()
    [running] = status["environments"].values()
    processes = {name: server["pid"] for name, server in running["servers"].items()}
    processes["the stack's daemon"] = status["pid"]
    rest_mb, before = await asyncio.to_thread(_megabytes, pids), _usage(processes)
    used, most_mb, files = _processor_s(pids), rest_mb, 0
    task = asyncio.create_task(context.run_all(several, TOGETHER))
    try:
        while not task.done():
            await asyncio.wait([task], timeout=POLL_S)
            most_mb = max(most_mb, await asyncio.to_thread(_megabytes, pids))
            now = _usage(processes)
            files = max(files, *(now[name][1] - before[name][1] for name in now))
    finally:
        task.cancel()
    rollouts = [rollout for rollout in task.result() if rollout.error is None]
    figures: dict[str, float | str] = {
        "busy_mb": most_mb,
        "rollout_mb": round((most_mb - rest_mb) / TOGETHER, 2),
        "rollout_files": round(files / TOGETHER, 1),
    }
    seconds = _processor_s(pids) - used
    if rollouts and seconds > 0:
        figures["rollouts_per_core_s"] = float(f"{len(rollouts) / seconds:.3g}")
        each_s = {name: (now[name][0] - before[name][0]) / len(rollouts) for name in now}
        whole_s = seconds / len(rollouts) + each_s["the stack's daemon"]
        most, figures["limited_by"] = ceiling(each_s, whole_s, os.cpu_count() or 1)
        figures["most_rollouts_s"] = float(f"{most:.3g}")
    return figures


def ceiling(process_s: Mapping[str, float], whole_s: float, cores: int) -> tuple[float, str]:
    """Return how many rollouts a second a machine carries, and what limits it.

    `process_s` is the CPU time that a rollout takes in each process, which has one core at most; `whole_s` is that of all.
    """
    busy_s = {**process_s, f"{cores} core{'s' * (cores > 1)}": whole_s / cores}
    limit = max(busy_s, key=busy_s.__getitem__)
    return 1 / busy_s[limit], limit


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
    family = [member for pid in pids for member in (pid, *descendants(pid))]
    return round(proportional_bytes(family) / 1e6, 1)


def _processor_s(pids: Sequence[int]) -> float:
    """Seconds of CPU time of the processes and of what they started."""
    return sum(map(ticks_of, pids)) / os.sysconf("SC_CLK_TCK")


def _usage(processes: Mapping[str, int]) -> dict[str, tuple[float, int]]:
    """Seconds of CPU time of each process alone, in which its event loop is busy, and its open files; not of one that ended."""
    usage = {}
    for name, pid in processes.items():
        with contextlib.suppress(OSError):
            ticks = sum(map(int, stat(pid)[11:13]))
            usage[name] = ticks / os.sysconf("SC_CLK_TCK"), len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    return usage
