"""How many processes each server of an environment has: NeMo Gym's `num_workers`, for servers that can have several.

A rollout belongs to one worker of its agent, and each worker of an agent calls one worker of every resources server. So
what a server keeps in memory of a rollout, such as its session, is found again, whether or not its code shares it.
What it keeps for all rollouts, such as a limit on its concurrency, each of its workers has for itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gymgate.catalog.resolve import AGENTS, RESOURCES, ServerInstance, references, servers_of
from gymgate.errors import ConfigError
from gymgate.stack.gym_config import own_modules

T = TypeVar("T")

_LIMITS_WORKERS = re.compile(r"\bself\.(?:config\.)?num_workers\b|\bnum_workers\s*:\s*Literal\[1\]")


@dataclass(frozen=True)
class Workers:
    """The number of processes of each of an environment's servers, from its `num_workers`."""

    counts: dict[str, int]
    """Processes of each server that is started."""
    warnings: tuple[str, ...]
    """A line for each server that has fewer than its config says."""


def count_workers(
    config: Mapping[str, Any],
    servers: Sequence[ServerInstance],
    directories: Mapping[str, Path],
    in_processes: Collection[str],
    agent_processes: int,
) -> Workers:
    """Return how many processes each of these servers of a config has. Blocking: it reads the code of servers.

    An agent has at least as many as the resources servers that it names. Those in `in_processes` have one process per
    rollout in place of workers, at most `agent_processes` at once. Raises `ConfigError` for a `num_workers` that is no number.
    """
    counts = {server.name: 1 for server in servers}
    warnings = []
    others = (
        each for each in servers_of(config) if each.kind not in (AGENTS, RESOURCES) or not each.entrypoint
    )
    for server in (*servers, *others):
        if (asked := _asked(server)) > 1:
            if (reason := _reason_for_one(server, directories, in_processes)) is None:
                counts[server.name] = asked
            else:
                warnings.append(f"{server.key}.num_workers={asked} has no effect: {reason}")
    agents = [server for server in servers if server.kind == AGENTS]
    for agent in agents:
        named = (counts.get(name, 1) for _, kind, name in references(agent.block) if kind == RESOURCES)
        wanted = max([counts[agent.name], *named])
        if wanted > 1 and _reason_for_one(agent, directories, in_processes) is None:
            counts[agent.name] = wanted
    usable = max(agent_processes if each.name in in_processes else counts[each.name] for each in agents)
    for server in servers:
        if (count := counts[server.name]) > usable:
            counts[server.name] = usable
            warnings.append(
                f"{server.key}.num_workers={count} has the effect of {usable}: no agent has more processes"
            )
    return Workers(counts, tuple(warnings))


def worker_name(server: str, worker: int, count: int) -> str:
    """Return the name of a server's process: `worker` counts from 0, of `count`."""
    return f"{server} worker {worker + 1}" if count > 1 else server


def workers_of(servers: Mapping[str, T], server: str) -> list[T]:
    """Return what a mapping by the names of processes holds of a server's workers."""
    numbered = re.compile(rf"{re.escape(server)}( worker \d+)?")
    return [each for name, each in servers.items() if numbered.fullmatch(name)]


def _asked(server: ServerInstance) -> int:
    value = server.block.get("num_workers")
    try:
        return max(int(value or 1), 1)
    except (TypeError, ValueError):
        raise ConfigError(f"{server.key}.num_workers is {value!r}; give a whole number") from None


def _reason_for_one(
    server: ServerInstance, directories: Mapping[str, Path], in_processes: Collection[str]
) -> str | None:
    """Return why a server has no more than one worker, if that is so."""
    if not server.entrypoint:
        return "the config has no server of this name with an entrypoint"
    if server.kind not in (AGENTS, RESOURCES):
        return "gymgate's daemon answers in its place"
    if server.name in in_processes:
        return "it has one process per rollout; set agent_processes (--agent-processes)"
    for path in own_modules(directories[server.name]):
        if _LIMITS_WORKERS.search(path.read_text(errors="replace")):
            return f"its code limits it ({path.relative_to(directories[server.name].parent)})"
    return None
