"""What a real model gets (`-b`): pass@1 with its standard error, turns, tokens and seconds."""

from __future__ import annotations

import asyncio
import math
import statistics

from gymgate.check.record.bench import Bench, Unmeasured, reward_of
from gymgate.check.record.sections import PolicyRewards
from gymgate.rollout import Rollout

AT_ONCE = 8


async def measure(bench: Bench) -> PolicyRewards:
    endpoint, rows = bench.request.policy, bench.rows[: bench.request.policy_rows]
    if endpoint is None:
        raise Unmeasured("no endpoint was named (-b)")
    if not rows:
        raise Unmeasured("it has no packaged rows")
    bench.judge.begin(None)
    free = asyncio.Semaphore(AT_ONCE)

    async def run(row: dict[str, object]) -> Rollout:
        async with free:
            return await bench.replayer.run(row, endpoint.resolved())

    rollouts = await asyncio.gather(*map(run, rows))
    if bench.judge.refused:
        raise Unmeasured("its judge was asked; name an endpoint for it with --judge")
    rewards = [reward for rollout in rollouts if (reward := reward_of(rollout)) is not None]
    done = [rollout for rollout in rollouts if rollout.error is None]
    errors = [rollout.error.message for rollout in rollouts if rollout.error is not None]
    tokens = [[call.usage.output_tokens for call in rollout.policy_calls] for rollout in done]
    counted = [sum(filter(None, each)) for each in tokens if each and None not in each]
    return PolicyRewards(
        model=endpoint.model or endpoint.base_url,
        rows=len(rows),
        scored=len(rewards),
        pass_at_1=statistics.fmean(rewards) if rewards else None,
        standard_error=statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None,
        seconds=statistics.fmean(each.timing.total_s for each in done) if done else None,
        turns=statistics.fmean(len(each.policy_calls) for each in done) if done else None,
        output_tokens=statistics.fmean(counted) if counted else None,
        missing={"pass_at_1": errors[0][:300] if errors else "no reward"} if not rewards else {},
    )
