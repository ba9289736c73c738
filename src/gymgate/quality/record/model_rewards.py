"""What a real model gets (`-b`): pass@1 with its standard error, turns, tokens and seconds."""

from __future__ import annotations

import asyncio
import datetime

from gymgate.quality.record.context import MeasurementContext, Unmeasured, reward_of
from gymgate.quality.recordings import RowData
from gymgate.quality.sections import PolicyRewards
from gymgate.rollouts import Rollout
from gymgate.runs.counted.statistics import clustered_error, mean

AT_ONCE = 8


async def measure(context: MeasurementContext) -> PolicyRewards:
    endpoint, rows = context.request.policy, context.rows[: context.request.rows]
    if endpoint is None:
        raise Unmeasured("no endpoint was given (-b)")
    context.refuse_cohorts()
    if not rows:
        raise Unmeasured("it has no packaged rows")
    context.judge.begin(None)
    free = asyncio.Semaphore(AT_ONCE)

    async def run(row: RowData) -> Rollout:
        async with free:
            return await context.replayer.run(row, endpoint.resolved())

    async def run_repeats(row: RowData) -> list[Rollout]:
        return await asyncio.gather(*(run(row) for _ in range(repeats)))

    repeats = context.request.repeats
    groups = await asyncio.gather(*map(run_repeats, rows))
    if context.judge.refused:
        raise Unmeasured("its judge was asked; give its endpoint with `--judge`")
    rollouts = [rollout for group in groups for rollout in group]
    by_row = [[reward for rollout in group if (reward := reward_of(rollout)) is not None] for group in groups]
    rewards = [reward for group in by_row for reward in group]
    done = [rollout for rollout in rollouts if rollout.error is None]
    errors = [rollout.error.message for rollout in rollouts if rollout.error is not None]
    tokens = [[call.usage.output_tokens for call in rollout.policy_calls] for rollout in done]
    counted = [sum(filter(None, counts)) for counts in tokens if counts and None not in counts]
    return PolicyRewards(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        model=endpoint.model or endpoint.base_url,
        sampling=dict(endpoint.sampling),
        rows=len(rows),
        repeats=repeats,
        timeout_s=context.request.limits.timeout_s,
        scored=len(rewards),
        pass_at_1=mean(rewards),
        standard_error=clustered_error(by_row),
        seconds=mean([rollout.timing.total_s for rollout in done]),
        turns=mean([len(rollout.policy_calls) for rollout in done]),
        output_tokens=mean(counted),
        missing={"pass_at_1": errors[0][:300] if errors else "no reward"} if not rewards else {},
    )
