"""Model calls/s of one environment whose servers have several workers, and where its limit then is.

    ./dev python -m benchmarks workers [--workers 1,2,4] [--rollouts 400] [--concurrency 32] [--rounds 3]

example_single_tool_call, two model calls and one tool call a rollout, with a policy that answers at once from a script. The
stacks run in turn. Measured: calls/s, and processor milliseconds per model call, all of a kind and of its busiest worker. A
worker is one event loop, so 1,000 divided by the busiest one's milliseconds is the limit of its kind: arithmetic, which a
machine with too few cores does not reach. A round of all takes about half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from collections import defaultdict

from benchmarks.contenders import ENVIRONMENT, rate, stack_run
from benchmarks.machine import cpu_s, describe, numbers, print_table
from benchmarks.progress import Steps
from benchmarks.scripted_policy import scripted_policy
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, RuntimeConfig, StackConfig
from gymgate.gym.catalog import Catalog
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack import Stack, acquire

CALLS = 2
"""Model calls of a rollout."""
AGENT = f"{ENVIRONMENT}_simple_agent"
KEYS = (f"{ENVIRONMENT}.resources_servers.{ENVIRONMENT}", f"{AGENT}.responses_api_agents.simple_agent")
Found = dict[str, list[float]]


def config(workers: int) -> StackConfig:
    overrides = tuple((f"{key}.num_workers", workers) for key in KEYS)
    return StackConfig(environments=(EnvironmentConfig(name=ENVIRONMENT, overrides=overrides),))


async def used(stack: Stack) -> dict[tuple[str, int], float]:
    """Seconds of processor time by kind and process."""
    status = await stack.status()
    (environment,) = status["environments"].values()
    pids = [("daemon", status["pid"]), ("sdk", os.getpid())]
    for name, server in environment["servers"].items():
        pids.append(("agent" if name.startswith(AGENT) else "resources", server["pid"]))
    return {(kind, pid): cpu_s(pid) for kind, pid in pids}


async def measure(args: argparse.Namespace, url: str) -> dict[int, Found]:
    runtime = await asyncio.to_thread(ensure_runtime, RuntimeConfig())
    data = Catalog(runtime.site, runtime.version).find(ENVIRONMENT).data_file().path
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    policy = HTTPEndpoint(base_url=url, dialect="responses")
    found: dict[int, Found] = {workers: defaultdict(list) for workers in args.workers}
    steps = Steps(args.rounds * len(args.workers))
    async with contextlib.AsyncExitStack() as exits:
        stacks = {each: await exits.enter_async_context(acquire(config(each))) for each in args.workers}
        for number in range(args.rounds):
            for workers, stack in stacks.items():
                steps.begin(f"round {number + 1} of {args.rounds}: {workers} workers")
                await rate(rows, args.concurrency, args.concurrency, stack_run(stack, policy))
                before, started = await used(stack), time.perf_counter()
                await rate(rows, args.rollouts - len(rows), args.concurrency, stack_run(stack, policy))
                wall_s, after = time.perf_counter() - started, await used(stack)
                calls = CALLS * args.rollouts  # with one of each row, which `rate` runs first
                found[workers]["calls/s"].append(calls / wall_s)
                each_ms: Found = defaultdict(list)
                for (kind, pid), seconds in after.items():
                    each_ms[kind].append((seconds - before[kind, pid]) * 1000 / calls)
                for kind, values in each_ms.items():
                    found[workers][kind].append(sum(values))
                    found[workers][f"busiest {kind}"].append(max(values))
    return found


def print_found(found: dict[int, Found]) -> None:
    """Medians."""
    rows = []
    for workers, values in found.items():
        middle = {name: statistics.median(each) for name, each in values.items()}
        limits = {kind: 1000 / middle[f"busiest {kind}"] for kind in ("agent", "resources", "daemon")}
        rows.append(
            [
                str(workers),
                f"{middle['calls/s']:.0f}",
                *(f"{middle[kind]:.2f}" for kind in ("agent", "resources", "daemon", "sdk")),
                *(f"{middle[f'busiest {kind}']:.2f}" for kind in ("agent", "resources")),
                *(f"{limits[kind]:,.0f}" for kind in limits),
            ]
        )
    head = ["workers", "calls/s", "agent, ms", "resources, ms", "daemon, ms", "SDK, ms"]
    head += [
        "busiest agent, ms",
        "busiest resources, ms",
        "agent's limit",
        "resources' limit",
        "daemon's limit",
    ]
    print_table(head, rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4])
    parser.add_argument("--rollouts", type=int, default=400, help="of each in each round")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    print(describe("aiohttp"), flush=True)
    with scripted_policy() as url:
        print_found(asyncio.run(measure(args, url)))


if __name__ == "__main__":
    main()
