"""What a node, ten and a thousand carry, computed from measured costs, with a simulation of one node beside it.

    ./dev python -m benchmarks scaling [--cores 2,16,64] [--nodes 1,10,1000] [--workers 1] [--policy-s 0.54] [--calls 4.5]

The costs below are CPU milliseconds per model call, measured by `workers` (docs/scaling.md, 2026-11-24); measure
them on a machine of yours and pass them with `--costs`. The simulation is a closed network: each rollout alternates
between the policy, which has room for all, and the servers of the node, each of which does one thing at a time, while
all of them together share its cores.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass

from benchmarks.machine import numbers, print_table
from gymgate.gateway.serving_process import FILES_PER_ROLLOUT
from gymgate.quality.record.overhead import ceiling

COSTS = {"agent": 2.7, "resources": 1.76, "daemon": 0.64, "sdk": 0.15}
"""Processor ms per model call: simple_agent, a light resources server, the stack's daemon, the SDK's process."""
MEMORY_MB = {"stack": 120.0, "environment": 71.0, "worker": 60.0}
"""A worker: one more process of the agent and one of the resources server."""
MEMORY_KB_ROLLOUT = 308.0
"""In all processes, three quarters of it in the agent's; measured by `realistic --answer-s 240`."""


@dataclass
class Node:
    """Stations that each do one thing at a time, on cores that do a few."""

    cores: int
    costs_ms: dict[str, float]
    workers: int = 1
    """Processes of the agents, and of the resources servers, of all environments."""


def ceiling_of(cores: int, costs: dict[str, float], workers: int) -> tuple[float, str]:
    """Model calls/s that a node carries, and what limits it; `workers` are the processes of agents, and of resources servers."""
    busiest = {
        name: cost / 1000 / (workers if name in ("agent", "resources") else 1) for name, cost in costs.items()
    }
    return ceiling(busiest, sum(costs.values()) / 1000, cores)


def simulate(concurrency: int, policy_s: float, node: Node, *, seconds: float = 20.0, seed: int = 0) -> float:
    """Model calls/s of `concurrency` rollouts on a node; each call visits every station once."""
    randomness = random.Random(seed)
    stations = [
        f"{name}-{number}" if name in ("agent", "resources") else name
        for name in node.costs_ms
        for number in range(node.workers if name in ("agent", "resources") else 1)
    ]
    queues: dict[str, deque[int]] = {name: deque() for name in stations}
    busy: set[str] = set()
    route = list(node.costs_ms)
    step = [0] * concurrency
    events: list[tuple[float, int, str]] = []
    for rollout in range(concurrency):
        heapq.heappush(events, (randomness.expovariate(1 / policy_s), rollout, "policy"))
    now, done, running = 0.0, 0, 0

    def place(rollout: int) -> str:
        name = route[step[rollout]]
        return f"{name}-{rollout % node.workers}" if name in ("agent", "resources") else name

    def start_waiting() -> None:
        nonlocal running
        for name in stations:
            if running >= node.cores:
                return
            if name not in busy and queues[name]:
                rollout = queues[name].popleft()
                busy.add(name)
                running += 1
                cost_s = node.costs_ms[route[step[rollout]]] / 1000
                heapq.heappush(events, (now + randomness.expovariate(1 / cost_s), rollout, name))

    while events and now < seconds:
        now, rollout, name = heapq.heappop(events)
        if name != "policy":
            busy.discard(name)
            running -= 1
            step[rollout] += 1
        if step[rollout] == len(route):
            step[rollout] = 0
            done += 1
            heapq.heappush(events, (now + randomness.expovariate(1 / policy_s), rollout, "policy"))
        else:
            queues[place(rollout)].append(rollout)
        randomness.shuffle(stations)
        start_waiting()
    return done / now


def rows_of(args: argparse.Namespace) -> list[list[str]]:
    """One line per size of node and cluster: what limits it, and what that allows."""
    found = []
    workers = args.environments * args.workers
    for cores in args.cores:
        calls, wall = ceiling_of(cores, args.costs, workers)
        live = calls * args.policy_s
        simulated = simulate(int(live * 1.5) or 1, args.policy_s, Node(cores, args.costs, workers))
        for nodes in args.nodes:
            found.append(
                [
                    f"{nodes:,} x {cores} cores",
                    wall,
                    f"{nodes * calls:,.0f}",
                    f"{nodes * simulated:,.0f}",
                    f"{nodes * calls / args.calls * 3600:,.0f}",
                    f"{nodes * live:,.0f}",
                    f"{memory_gb(live, args.environments, workers):.1f}",
                    f"{live * FILES_PER_ROLLOUT:,.0f}",
                ]
            )
    return found


def memory_gb(live: float, environments: int, workers: int) -> float:
    """Of one node: the stack, its environments and their further workers, and what live rollouts hold."""
    servers = environments * MEMORY_MB["environment"] + (workers - environments) * MEMORY_MB["worker"]
    return (MEMORY_MB["stack"] + servers + live * MEMORY_KB_ROLLOUT / 1024) / 1024


HEAD = [
    "cluster",
    "next wall",
    "calls/s",
    "simulated",
    "rollouts/h",
    "rollouts at once",
    "GB per node",
    "descriptors per node",
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cores", type=numbers, default=[2, 16, 64])
    parser.add_argument("--nodes", type=numbers, default=[1, 10, 1000])
    parser.add_argument(
        "--environments", type=int, default=1, help="in one stack, with rows spread over them"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of each server (num_workers)")
    parser.add_argument("--policy-s", type=float, default=0.54, help="mean seconds of a policy call")
    parser.add_argument("--calls", type=float, default=4.5, help="mean calls of a rollout")
    parser.add_argument("--costs", type=_costs, default=COSTS, help="agent=2.7,resources=1.76,... in ms")
    print_table(HEAD, rows_of(parser.parse_args(argv)))


def _costs(text: str) -> dict[str, float]:
    return {name: float(value) for name, _, value in (part.partition("=") for part in text.split(","))}


if __name__ == "__main__":
    main()
