"""Deterministic: the same answers get the same reward, in any order and beside others."""

from __future__ import annotations

import time

from gymgate.quality.model import same_reward
from gymgate.quality.record.context import MeasurementContext, ReplayCase, Unmeasured, reward_of
from gymgate.quality.sections import Changed, Deterministic

AT_ONCE = 8
PASS_S = 40.0
"""Seconds after which the first pass begins no further rollout; the others run the same."""
JUDGED = "its judge's recorded answers belong to one rollout at a time"


async def measure(context: MeasurementContext) -> Deterministic:
    rewards: dict[str, list[float | None]] = {}
    replays: list[ReplayCase] = []
    began = time.monotonic()
    for replay in context.replays:
        if replays and time.monotonic() - began > PASS_S:
            break
        replays.append(replay)
        rewards[replay.name] = [reward_of(await context.run(replay))]
    for replay in reversed(replays):
        rewards[replay.name].append(reward_of(await context.run(replay)))
    if not context.has_recorded_judge:
        several = replays * -(-AT_ONCE // len(replays))  # at least eight
        for replay, rollout in zip(several, await context.run_all(several, AT_ONCE), strict=True):
            rewards[replay.name].append(reward_of(rollout))
    if not any(reward is not None for values in rewards.values() for reward in values):
        raise Unmeasured("scored again, no rollout of it gets a reward that counts")
    numbers = {
        replay.name: tuple(r for r in (replay.replayed, *rewards[replay.name]) if r is not None)
        for replay in replays
    }
    return Deterministic(
        rollouts=len(replays),
        scored=sum(reward is not None for values in rewards.values() for reward in values),
        failed=sum(values.count(None) for values in rewards.values()),
        at_once=None if context.has_recorded_judge else AT_ONCE,
        changed=tuple(
            Changed(rollout=name, rewards=values)
            for name, values in numbers.items()
            if any(not same_reward(values[0], other) for other in values[1:])
        ),
        missing={"at_once": JUDGED} if context.has_recorded_judge else {},
    )
