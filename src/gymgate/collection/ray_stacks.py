"""A stack on every node of a Ray cluster, and rollouts spread over them. Uses only Ray's public API.

Each node needs gymgate, and makes or finds the runtime itself. When a node is lost, the rollouts on it fail
(infrastructure) and their retries go to other nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gymgate.config import HTTPEndpoint, ReplayEndpoint, RolloutLimits, StackConfig
from gymgate.errors import (
    ConfigError,
    GymgateError,
    MissingExtraError,
    ServerDiedError,
    StackLostError,
    from_wire,
)
from gymgate.rollout import Rollout
from gymgate.rollout.result import failed_rollout
from gymgate.stack import Policy, Stack, connect
from gymgate.stack.wire import endpoint_from_wire, endpoint_to_wire, stack_to_wire

STOP_S = 15.0
CONNECT_S = 10.0
_OTHER_CALLS = 16
"""Calls to a node at the same time, beside its rollouts."""


class NodeStack:
    """The actor on a node: one stack. Errors travel as dicts, because Ray would rebuild exceptions wrongly."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = StackConfig.model_validate(config)
        self._stack: Stack | None = None

    async def start(self) -> dict[str, Any] | None:
        """Start the stack; `None`, or why it did not start."""
        try:
            self._stack = await connect(self._config)
        except GymgateError as error:
            return error.to_wire()
        return None

    async def run(
        self, row: Mapping[str, Any], policy: Mapping[str, Any], limits: Mapping[str, Any], **options: Any
    ) -> dict[str, Any]:
        """Run a rollout; `{"rollout": ...}`, or `{"raised": ...}` with the error that kept it from starting."""
        assert self._stack is not None
        endpoint = endpoint_from_wire(policy)
        assert not isinstance(endpoint, str)
        try:
            rollout = await self._stack.run(row, policy=endpoint, limits=RolloutLimits(**limits), **options)
        except GymgateError as error:
            return {"raised": error.to_wire()}
        return {"rollout": rollout}

    async def status(self) -> dict[str, Any]:
        assert self._stack is not None
        return await self._stack.status()

    async def stop(self) -> None:
        if self._stack is not None:
            await self._stack.close()


@dataclass
class Node:
    """An actor and the number of rollouts under way on it."""

    name: str
    actor: Any
    in_flight: int = 0


class RayStacks:
    """The nodes that are left, with `run` and `status` like those of a `Stack`."""

    def __init__(self, nodes: list[Node], ray: Any, log: Callable[[str], None]) -> None:
        self.nodes = nodes
        self._ray = ray
        self._log = log

    async def run(
        self,
        row: Mapping[str, Any],
        *,
        policy: Policy,
        environment: str | None = None,
        limits: RolloutLimits | None = None,
        record_bodies: bool = True,
    ) -> Rollout:
        """Run a rollout on the node with the fewest. Raises as `Stack.run`; `StackLostError` when no node is left."""
        if not self.nodes:
            raise StackLostError("every node of the Ray cluster is lost")
        node = min(self.nodes, key=lambda each: each.in_flight)
        wire = endpoint_to_wire(_sendable(policy))
        plain = (limits or RolloutLimits()).model_dump()
        node.in_flight += 1
        try:
            outcome = await node.actor.run.remote(
                row, wire, plain, environment=environment, record_bodies=record_bodies
            )
        except self._ray.exceptions.RayActorError as error:
            self._lose(node, f"{type(error).__name__}")
            return _lost(node, environment)
        finally:
            node.in_flight -= 1
        if "rollout" in outcome:
            rollout: Rollout = outcome["rollout"]
            return rollout
        raised = from_wire(outcome["raised"])
        if isinstance(raised, StackLostError):
            self._lose(node, raised.message)
            return _lost(node, environment)
        raise raised

    async def status(self) -> dict[str, Any]:
        """Open model calls and replicas of all nodes together."""
        answers = await asyncio.gather(*(_status(node) for node in self.nodes))
        calls: Counter[str] = Counter()
        replicas: dict[str, dict[str, Any]] = {}
        for answer in answers:
            calls.update(answer.get("calls") or {})
            for url, state in (answer.get("replicas") or {}).items():
                known = replicas.setdefault(url, {"healthy": True, "output_tokens": 0})
                known["healthy"] = known["healthy"] and state["healthy"]
                known["output_tokens"] += state["output_tokens"]
        return {"calls": dict(calls), "replicas": replicas}

    def _lose(self, node: Node, why: str) -> None:
        if node in self.nodes:
            self.nodes.remove(node)
            self._log(f"node {node.name} is lost ({why}); {len(self.nodes)} are left and take its rollouts")


@asynccontextmanager
async def ray_stacks(
    address: str, config: StackConfig, concurrency: int, log: Callable[[str], None]
) -> AsyncIterator[RayStacks]:
    """Start a stack on every node of an existing cluster (`auto`, or HOST:PORT); stop them in the end.

    Raises `MissingExtraError` without Ray, `ConfigError` for an address where no cluster answers, and the error of
    the first node whose stack does not start.
    """
    ray = _ray()
    await asyncio.to_thread(_connect, ray, address)
    nodes: list[Node] = []
    try:
        for described in ray.nodes():
            if described["Alive"]:
                nodes.append(_node(ray, described, config, concurrency))
        log(f"Ray: starting a stack on each of {len(nodes)} nodes")
        for failure in await asyncio.gather(*(node.actor.start.remote() for node in nodes)):
            if failure is not None:
                raise from_wire(failure)
        yield RayStacks(list(nodes), ray, log)
    finally:
        await asyncio.gather(*(_stop(ray, node) for node in nodes), return_exceptions=True)
        ray.shutdown()


def _node(ray: Any, described: Mapping[str, Any], config: StackConfig, concurrency: int) -> Node:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(described["NodeID"], soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": concurrency + _OTHER_CALLS}
    actor = ray.remote(NodeStack).options(**options).remote(stack_to_wire(config))
    return Node(f"{described['NodeManagerHostname']}/{described['NodeID'][:8]}", actor)


def _connect(ray: Any, address: str) -> None:
    try:
        _refuse_silence(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--ray {address!r}: no Ray cluster answers there: {reason}") from error


def _refuse_silence(address: str) -> None:
    """Raise `ConnectionError` if nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


async def _stop(ray: Any, node: Node) -> None:
    with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
        async with asyncio.timeout(STOP_S):
            await node.actor.stop.remote()
    ray.kill(node.actor)


async def _status(node: Node) -> Mapping[str, Any]:
    try:
        status: Mapping[str, Any] = await node.actor.status.remote()
    except Exception:  # the node is lost; the next rollout on it reports that
        return {}
    return status


def _sendable(policy: Policy) -> HTTPEndpoint | ReplayEndpoint:
    if not isinstance(policy, HTTPEndpoint | ReplayEndpoint):
        raise ConfigError("a Python callable cannot be the policy on a Ray cluster; give an endpoint")
    return policy


def _lost(node: Node, environment: str | None) -> Rollout:
    error = ServerDiedError(f"node {node.name} was lost while the rollout was on it", server=node.name)
    return failed_rollout(error, environment=environment or "")


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError("--ray needs Ray: pip install 'gymgate[ray]'") from error
