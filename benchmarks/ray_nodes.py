"""Rollouts/s on 1, 2 and 4 nodes of a Ray cluster, under a policy that is slow and does not load the processor.

    .venv-train/bin/python -m benchmarks ray [--nodes 1,2,4] [--per-stack 16] [--call-s 5] [--waves 4]

All nodes are raylets on this machine, so they share its cores and the network is loopback: what is measured is whether the pool
keeps every stack's rollouts at its limit, and what the way over Ray adds. The line "no Ray" is a stack without it. Each rollout
makes two calls of `--call-s` seconds. The ideal is `--per-stack` rollouts at once on each node, with nothing taking time but the
policy. The first wave is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.contenders import ENVIRONMENT
from benchmarks.delayed_policy import delayed_policy, row_with
from benchmarks.machine import describe, free_port, numbers, print_table
from gymgate import open_rows
from gymgate.core.config import HTTPEndpoint, RayCluster, StackConfig
from gymgate.stack import acquire

CALLS = 2
STARTS = 4
AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
    "dashboard_agent_listen_port",
)
HEAD = [
    "nodes",
    "rollouts at once",
    "ideal, rollouts/s",
    "measured",
    "of the ideal",
    "added per rollout, median ms",
    "processor ms per rollout, this process",
]


def add_node(cluster: Any, cpus: int) -> Any:
    """Start one more raylet and return its node."""
    # It waits 15 s for its agents to write the ports that they chose.
    ports = {name: free_port() for name in AGENT_PORTS}
    return cluster.add_node(num_cpus=cpus, include_dashboard=False, object_store_memory=80_000_000, **ports)


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Any]:
    """Ray's `Cluster` of so many raylets on this machine, each with so many CPUs; tried again if Ray gives up after its 30 s."""
    from ray.cluster_utils import Cluster

    for left in reversed(range(STARTS)):
        cluster: Any = Cluster()
        try:
            for number in cpus:
                add_node(cluster, number)
            break
        except Exception as error:  # Ray raises no other class
            cluster.shutdown()
            if "timed out during startup" not in str(error) or not left:
                raise
    try:
        yield cluster
    finally:
        cluster.shutdown()


async def measure(address: str | None, url: str, nodes: int, args: argparse.Namespace) -> list[str]:
    """Return one line of the table; without an address, of a stack without Ray."""
    row = row_with([args.call_s] * CALLS, dict(open_rows(ENVIRONMENT)[0].data))
    policy = HTTPEndpoint(base_url=url, dialect="responses")
    where = RayCluster(address, rollouts_per_stack=args.per_stack) if address else None
    at_once = nodes * args.per_stack
    added: list[float] = []
    async with acquire(StackConfig(environments=(ENVIRONMENT,)), where=where) as stack:

        async def rollouts(count: int) -> None:
            for _ in range(count):
                rollout = await stack.run(row, policy=policy, record_bodies=False)
                if rollout.error is not None or len(rollout.calls) != CALLS:
                    raise SystemExit(f"benchmarks: a rollout failed: {rollout.error}")
                added.append(rollout.timing.total_s - CALLS * args.call_s)

        async def wave(count: int) -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(rollouts(count))

        await wave(1)
        added.clear()
        started, used = time.monotonic(), time.process_time()
        await wave(args.waves)
        wall_s, processor_s = time.monotonic() - started, time.process_time() - used
    ideal, measured = at_once / (CALLS * args.call_s), at_once * args.waves / wall_s
    median_ms = f"{statistics.median(added) * 1000:.0f}"
    processor_ms = f"{processor_s / len(added) * 1000:.1f}"
    name = str(nodes) if address else "no Ray"
    return [
        name,
        str(at_once),
        f"{ideal:.2f}",
        f"{measured:.2f}",
        f"{measured / ideal:.0%}",
        median_ms,
        processor_ms,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=numbers, default=[1, 2, 4])
    parser.add_argument("--per-stack", type=int, default=16, help="rollouts at once on each stack")
    parser.add_argument("--call-s", type=float, default=5.0, help="seconds of each policy call")
    parser.add_argument("--waves", type=int, default=4, help="rollouts of each of those that run at once")
    args = parser.parse_args()
    with delayed_policy() as url:
        rows = [asyncio.run(measure(None, url, 1, args))]
        for nodes in args.nodes:
            with ray_cluster(*[1] * nodes) as cluster:
                rows.append(asyncio.run(measure(cluster.address, url, nodes, args)))
    print(describe("ray"))
    print_table(HEAD, rows)


if __name__ == "__main__":
    main()
