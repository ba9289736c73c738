"""Deterministic: the same answers get the same reward, in any order and beside others."""

from __future__ import annotations

import time

from gymgate.quality.model import same_reward
from gymgate.quality.record.bench import Bench, Subject, Unmeasured, reward_of
from gymgate.quality.record.sections import Changed, Deterministic

AT_ONCE = 8
PASS_S = 40.0
"""Seconds after which the first pass begins no further rollout; the others run the same."""
JUDGED = "its judge's recorded answers belong to one rollout at a time"


async def measure(bench: Bench) -> Deterministic:
    rewards: dict[str, list[float | None]] = {}
    subjects: list[Subject] = []
    began = time.monotonic()
    for subject in bench.subjects:
        if subjects and time.monotonic() - began > PASS_S:
            break
        subjects.append(subject)
        rewards[subject.name] = [reward_of(await bench.run(subject))]
    for subject in reversed(subjects):
        rewards[subject.name].append(reward_of(await bench.run(subject)))
    if not bench.asked_judge:
        several = subjects * -(-AT_ONCE // len(subjects))  # at least eight
        for subject, rollout in zip(several, await bench.run_all(several, AT_ONCE), strict=True):
            rewards[subject.name].append(reward_of(rollout))
    if not any(reward is not None for values in rewards.values() for reward in values):
        raise Unmeasured("scored again, no rollout of it gets a reward that counts")
    numbers = {
        subject.name: tuple(r for r in (subject.replayed, *rewards[subject.name]) if r is not None)
        for subject in subjects
    }
    return Deterministic(
        rollouts=len(subjects),
        scored=sum(reward is not None for values in rewards.values() for reward in values),
        failed=sum(values.count(None) for values in rewards.values()),
        at_once=None if bench.asked_judge else AT_ONCE,
        changed=tuple(
            Changed(rollout=name, rewards=values)
            for name, values in numbers.items()
            if any(not same_reward(values[0], other) for other in values[1:])
        ),
        missing={"at_once": JUDGED} if bench.asked_judge else {},
    )
