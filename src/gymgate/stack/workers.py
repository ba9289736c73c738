"""How many processes each server of an environment has: NeMo Gym's `num_workers`, for servers that can have several.

A rollout belongs to one worker of the agent or environment server that it is posted to, and each worker of these calls one
worker of every other server. So what a server keeps in memory of a rollout, such as its session, is found again, whether or
not its code shares it.
What it keeps for all rollouts, such as a limit on its concurrency, each of its workers has for itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from gymgate.core.errors import ConfigError
from gymgate.gym.inside.resolve import AGENTS, MODELS, RESOURCES, ServerInstance, references, servers_of
from gymgate.gym.server_code import ServerCode

T = TypeVar("T")


class Workers(NamedTuple):
    """The number of processes of each of an environment's servers, from its `num_workers`."""

    counts: dict[str, int]
    """Processes of each server that is started."""
    warnings: tuple[str, ...]
    """A line for each server that has fewer than its config says."""


def count_workers(
    config: Mapping[str, Any], code: Mapping[str, ServerCode], own_process: Collection[str]
) -> Workers:
    """Return how many processes each server has whose code is given.

    Agents in `own_process` have one process per rollout in place of workers. Raises `ConfigError` for a `num_workers`
    that is no number.
    """
    counts, warnings = dict.fromkeys(code, 1), []
    callers: list[ServerInstance] = []
    for server in servers_of(config):
        value = server.block.get("num_workers")
        try:
            requested = max(int(value or 1), 1)
        except (TypeError, ValueError):
            raise ConfigError(f"{server.key}.num_workers is {value!r}; give a whole number") from None
        reason = None
        if not server.entrypoint:
            reason = "the config has no server of this name with an entrypoint"
        elif server.kind == MODELS or server.is_relay:
            reason = "gymgate's daemon answers instead"
        elif server.name in own_process:
            reason = "it has one process per rollout; set agent_processes (--agent-processes)"
        elif server.name not in code:
            continue  # an agent that is not started
        elif (file := code[server.name].limits_workers) is not None:
            reason = f"its code limits it ({file})"
        else:
            counts[server.name] = requested
            callers += [server] if server.kind != RESOURCES else []
        if reason and requested > 1:
            warnings.append(f"{server.key}.num_workers={requested} has no effect: {reason}")
    # Agents first. With fewer workers of a caller, some of the servers that it calls would get no calls.
    for caller in sorted(callers, key=lambda server: server.kind != AGENTS):
        called = (RESOURCES,) if caller.kind == AGENTS else (RESOURCES, AGENTS)
        names = (name for _, kind, name in references(caller.block) if kind in called)
        counts[caller.name] = max(counts[caller.name], *(counts.get(name, 1) for name in names), 1)
    return Workers(counts, tuple(warnings))


def worker_name(server: str, worker: int, count: int) -> str:
    """Return the name of a server's process: `worker` counts from 0, of `count`."""
    return f"{server} worker {worker + 1}" if count > 1 else server


def workers_of(servers: Mapping[str, T], server: str) -> list[T]:
    """Return what a mapping by the names of processes holds of a server's workers."""
    numbered = re.compile(rf"{re.escape(server)}( worker \d+)?")
    return [value for name, value in servers.items() if numbered.fullmatch(name)]
