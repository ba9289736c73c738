"""A collection without NeMo Gym, as a program to be killed: rows from a file, answers made up, the rest is real.

    python collect_program.py ROWS OUTPUT REPEATS CONCURRENCY [KILOBYTES]

Every seventh attempt fails, by chance; a rollout's reward is a function of its identity; its result has so many
kilobytes. The last line printed is the most memory that the process had, in KiB.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gymgate.gym.row_sources import RowSource, open_rows
from gymgate.rollouts import Rollout, RolloutError
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.plan import Identity, PlannedRollout, RolloutPlan
from support.collecting import made_up_run


def reward_of(identity: Identity) -> float:
    return zlib.crc32(str(identity).encode()) % 1000 / 1000


kilobytes = 0


async def attempt(planned: PlannedRollout) -> Rollout:
    await asyncio.sleep(random.expovariate(20))
    if random.random() < 1 / 7:
        error = RolloutError(kind="infrastructure", message="no luck", type="ServerDiedError", retryable=True)
        return Rollout(id="x", environment="none", agent="none", status="failed", error=error)
    reward = reward_of(planned.identity)
    result = {"text": [f"{planned.identity} {number}".ljust(1000) for number in range(kilobytes)]}
    return Rollout(id="x", environment="none", agent="none", status="completed", reward=reward, result=result)


async def main(rows: str, output: str, repeats: str, concurrency: str) -> None:
    plan = RolloutPlan([RowSource(open_rows(rows, environment=None), "none")], repeats=int(repeats))
    pace = Pace(int(concurrency), budgets={"infrastructure": 1000}, fsync_s=0.05, failures_in_a_row=0)
    run = made_up_run(plan, attempt, output=Path(output), pace=pace)
    await run.run(on_ready=lambda progress: print("ready", progress.resumed, flush=True))


if __name__ == "__main__":
    import gymgate.runs.collected.run as run_module

    run_module.wait_s = lambda failures: 0.0
    kilobytes = int((sys.argv[5:] or ["0"])[0])
    asyncio.run(main(*sys.argv[1:5]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
