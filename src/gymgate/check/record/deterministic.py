"""Deterministic: the same answers get the same reward, in any order and beside others."""

from __future__ import annotations

import time

from gymgate.check.model import same_reward
from gymgate.check.record.bench import Bench, Subject, Unmeasured, reward_of
from gymgate.check.record.sections import Changed, Deterministic

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
    if not any(reward is not None for found in rewards.values() for reward in found):
        raise Unmeasured("scored again, no rollout of it gets a reward that counts")
    given = {name: tuple(r for r in found if r is not None) for name, found in rewards.items()}
    return Deterministic(
        rollouts=len(subjects),
        scored=sum(map(len, given.values())),
        failed=sum(found.count(None) for found in rewards.values()),
        at_once=None if bench.asked_judge else AT_ONCE,
        changed=tuple(
            Changed(rollout=name, rewards=found)
            for name, found in given.items()
            if any(not same_reward(found[0], other) for other in found[1:])
        ),
        missing={"at_once": JUDGED} if bench.asked_judge else {},
    )
