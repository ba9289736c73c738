"""Stacks on the nodes of a Ray cluster, behind one connection that speaks the protocol of a daemon.

    SDK process   Lease --- RayPool --- Lease --- Tunnel ... Ray's calls ... Relay --- daemon   on a node
                                         `-- Lease --- Tunnel ... Ray's calls ... Relay --- daemon   on another

So whoever holds the lease uses it as any other: rollouts go to the stack with the fewest, and calls of callables come back here.
A rollout whose stack is lost fails with `StackLostError`, and runs on another stack when its caller tries again.

Why the pool answers as a daemon and is no second kind of lease: that would save the pair of sockets and about 30 lines, but
whoever holds a lease would have to know two kinds, of which one has a process, a socket and a fork to let go of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from gymgate.core import codec
from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.core.errors import (
    ConfigError,
    GymgateError,
    RolloutTimeoutError,
    StackLostError,
    StackStartError,
    described,
)
from gymgate.rollouts.result import failed_rollout
from gymgate.stack.client.stack import Lease
from gymgate.stack.protocol import Peer, Reply
from gymgate.stack.ray.nodes import Tunnel, attach, detach, nodes_of, shared_actors, start_relay
from gymgate.stack.wire import endpoint_from_wire, stack_to_wire

LOOK_S = 2.0
"""Seconds between two looks at the cluster's nodes."""
PLACE_S = 20.0
"""Seconds for which a start waits for nodes whose CPUs are taken; their stacks join when CPUs are free."""
ERROR_LENGTH = 300
"""Characters of an error of Ray's that are shown. The reason is at its end."""
STOP_S = 15.0
"""For a stack on a node to stop before its actor is killed."""

logger = logging.getLogger(__name__)


class NodeStack:
    """One stack on a node, from the placement of its actor to its end."""

    def __init__(self, name: str, node_id: str, tunnel: Tunnel, *, shared: bool) -> None:
        """`shared`: other processes may use the same actor."""
        self.name = name
        self.node_id = node_id
        self.tunnel = tunnel
        self.shared = shared
        self.connection = Lease(self.describe_loss, None)
        self.placed = self.up = self.leaving = False
        self.error: GymgateError | None = None
        """Why it did not start."""
        self.in_flight = 0

    @property
    def serves(self) -> bool:
        """Whether rollouts run on it, or can once it is up."""
        return self.error is None and (not self.leaving or (self.up and self.in_flight > 0))

    def describe_loss(self) -> str:
        """Return why it is lost, for an error message."""
        return f"the stack on node {self.name} is lost ({self.tunnel.reason})"

    async def start(self, config: StackConfig, identity: str) -> None:
        """Place it and start its stack. Raises what keeps it from starting, and Ray's own errors."""
        plain = stack_to_wire(config.model_copy(update={"models": ()}))
        sock = await self.tunnel.open(plain, identity)
        self.placed = True
        await asyncio.get_running_loop().create_unix_connection(lambda: self.connection.peer, sock=sock)
        await self.connection.hello(config)
        self.up = True

    def leave(self) -> None:
        """Take no more rollouts, and end once none is under way."""
        self.leaving = True
        if not self.in_flight:
            self.connection.peer.abort()

    async def stop(self, ray: Any) -> None:
        """Give its lease back, and its actor if nobody else uses that."""
        last = not self.shared
        try:
            with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
                # One that was never placed answers nothing.
                async with asyncio.timeout(STOP_S if self.placed else 0):
                    await self.connection.goodbye()
                    last = await self.tunnel.actor.close.remote(self.tunnel.link)
            await self.tunnel.close()
        finally:
            if last:
                ray.kill(self.tunnel.actor)
            else:
                shared_actors.append(self.tunnel.actor)


class RayPool:
    """The stacks of one lease, and the end of the connection that its holder talks to."""

    def __init__(self, config: StackConfig, identity: str) -> None:
        assert config.ray is not None
        self.where = config.ray
        self.config = config.model_copy(update={"ray": None})
        self.identity = identity
        self.stacks: dict[tuple[str, int], NodeStack] = {}
        """By node and number there: those that start, are up, or did not start."""
        self.reason = "every stack on the Ray cluster is lost"
        """Why the pool's connection may have ended."""
        self.peer = Peer(
            {
                "hello": self._hello,
                "bye": self._bye,
                "run": self._run,
                "status": self._status,
            },
            {
                "ping": lambda _: self.peer.tell("pong"),
                "register": self._register,
                "forget": self._forget,
            },
            on_lost=self._begin_to_stop,
            describe_loss=lambda: "the SDK process is gone",
        )
        self._endpoints: dict[int, HTTPEndpoint] = {}
        """Those that the lease has registered, by its numbers. Each stack gets an endpoint with its first rollout."""
        self._ray: Any = None
        self._up = False
        """Whether the start is over. Until then `hello` raises the error of a stack that does not start."""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None

    async def connect(self) -> Lease:
        """Return a connection to the pool, which says hello as to a daemon."""
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        connection = Lease(lambda: self.reason, None)
        await loop.create_unix_connection(lambda: self.peer, sock=ours)
        await loop.create_unix_connection(lambda: connection.peer, sock=theirs)
        return connection

    async def _hello(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Start the stacks. Answers when all that have found room on a node are up, or with the first error."""
        self._ray = await asyncio.to_thread(attach, self.where.address)
        await self._look()
        if not self.stacks:
            raise ConfigError(
                f"no node of the Ray cluster has {self.where.cpus_per_stack or 0:g} CPUs for a stack"
            )
        what = "a stack" if self.where.cpus_per_stack is None else f"stacks ({len(self.stacks)} in all)"
        self._tell(f"Ray: starting {what} on each of {len({node for node, _ in self.stacks})} nodes")
        await self._wait_for_start()
        self._up = True
        self._in_background(self._keep_looking())
        descriptions = [stack.connection.description for stack in self.stacks.values() if stack.up]
        most = min(sys.maxsize, sum(description["max_rollouts"] for description in descriptions))
        return {**descriptions[0], "max_rollouts": most, "pid": os.getpid()}

    async def _wait_for_start(self) -> None:
        started = time.monotonic()
        while True:
            stacks, waited_s = [*self.stacks.values()], time.monotonic() - started
            if error := next((stack.error for stack in stacks if stack.error is not None), None):
                raise error
            placed = [stack for stack in stacks if stack.placed]
            if placed and all(stack.up for stack in (stacks if waited_s < PLACE_S else placed)):
                return
            if not placed and waited_s > self.config.start_timeout_s:
                raise StackStartError(
                    f"no node of the Ray cluster had room for a stack within {waited_s:.0f} s; see `ray status`"
                )
            await self._change()

    async def _bye(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        self._begin_to_stop()
        assert self._stopping is not None
        await asyncio.shield(self._stopping)
        return {"last": False}

    async def _run(self, message: dict[str, Any], row: bytes) -> Reply:
        """Run a row on the stack with the fewest rollouts. The wait for one with room counts as the rollout's time."""
        timeout_s, started = message["limits"]["timeout_s"], time.monotonic()
        endpoints = {
            role: self._endpoints[number]
            for role in ("policy", "judge_policy")
            if isinstance(number := message.get(role), int)
        }
        while (stack := self._with_room()) is None:
            if time.monotonic() - started >= timeout_s:
                most = f"every stack on the Ray cluster runs {self.where.rollouts_per_stack} rollouts"
                waited = f"Timed out after {timeout_s:g} s: {most}. Raise rollouts_per_stack or the timeout."
                return _failure_reply(message, RolloutTimeoutError(waited))
            await self._change()
        message["limits"]["timeout_s"] = max(timeout_s - (time.monotonic() - started), 0.001)
        stack.in_flight += 1
        try:
            with contextlib.ExitStack() as in_use:
                for role, endpoint in endpoints.items():
                    message[role] = in_use.enter_context(stack.connection.endpoints.number_of(endpoint))
                return await stack.connection.peer.exchange("run", message, row)
        except StackLostError as error:
            stack.connection.peer.abort()
            return _failure_reply(message, error)
        finally:
            stack.in_flight -= 1
            if stack.leaving:
                stack.leave()
            await self._notify(1)

    def _register(self, message: dict[str, Any]) -> None:
        endpoint = endpoint_from_wire(message["endpoint"])
        assert isinstance(endpoint, HTTPEndpoint)
        self._endpoints[message["number"]] = endpoint

    def _forget(self, message: dict[str, Any]) -> None:
        self._endpoints.pop(message["number"], None)

    async def _status(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Return the open model calls and replicas of all stacks together, and each stack's own status by node."""
        nodes: dict[str, Any] = {}
        calls: Counter[str] = Counter()
        replicas: dict[str, dict[str, Any]] = {}
        for number, stack in enumerate([stack for stack in self.stacks.values() if stack.up]):
            with contextlib.suppress(StackLostError):
                status = nodes[f"{stack.name}-{number}"] = await stack.connection.peer.call("status")
                calls.update(status["calls"])
                for url, state in status["replicas"].items():
                    total = replicas.setdefault(url, {"healthy": True, "output_tokens": 0})
                    total["healthy"] = total["healthy"] and state["healthy"]
                    total["output_tokens"] += state["output_tokens"]
        return {"calls": calls, "replicas": replicas, "nodes": nodes}

    def _with_room(self) -> NodeStack | None:
        """Return the stack with the fewest rollouts, if it takes one more."""
        taking = [stack for stack in self.stacks.values() if stack.up and not stack.leaving]
        stack = min(taking, key=lambda stack: stack.in_flight, default=None)
        return stack if stack is not None and stack.in_flight < self.where.rollouts_per_stack else None

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception as error:  # Ray's control store restarts, say; looked at again
                logger.warning("cannot look at the Ray cluster: %s", described(error))

    async def _look(self) -> None:
        """Place a stack wherever one is missing. A node that is being drained gets no more rollouts."""
        nodes, draining = await asyncio.to_thread(nodes_of, self._ray)
        cpus = self.where.cpus_per_stack
        for node in nodes:
            count = 1 if cpus is None else int(node["Resources"].get("CPU", 0) // cpus)
            for key in ((node["NodeID"], number) for number in range(count)):
                if key not in self.stacks and node["NodeID"] not in draining:
                    self.stacks[key] = self._place(*key, node["NodeManagerHostname"])
        for stack in self.stacks.values():
            if stack.node_id in draining and not stack.leaving:
                self._tell(
                    f"warning: node {stack.name} is being drained; {stack.in_flight} rollouts end there"
                )
                stack.leave()

    def _place(self, node_id: str, number: int, host: str) -> NodeStack:
        shared = self.config.share == "machine"
        name = f"{self.identity}-{node_id}-{number}" if shared else None
        actor = start_relay(self._ray, node_id, self.where.cpus_per_stack or 0, name)
        tunnel = Tunnel(actor, secrets.token_hex(8))
        stack = NodeStack(f"{host}/{node_id[:8]}", node_id, tunnel, shared=shared)
        # A callable is called in the process that registered it, which is at the other end of the pool.
        stack.connection.peer.handlers["policy"] = lambda call, body: self.peer.exchange("policy", call, body)
        stack.connection.progress = lambda line: self._tell(f"{stack.name}: {line}")
        self._in_background(self._keep(stack, (node_id, number)))
        return stack

    async def _keep(self, stack: NodeStack, key: tuple[str, int]) -> None:
        """Start a stack and stop it in the end. One that was lost is placed again if its node is still there."""
        try:
            await stack.start(self.config, self.identity)
            await self._notify()
            await stack.connection.peer.lost.wait()
        except StackLostError:
            pass
        except GymgateError as error:
            stack.error = error
        except self._ray.exceptions.RayError as error:  # only before it is up; later the connection is lost
            stack.error = StackStartError(f"Ray: {' '.join(described(error).split())[-ERROR_LENGTH:]}")
        finally:
            stack.up = False
            if self._stopping is None:
                self._report_end(stack, key)
            await stack.stop(self._ray)

    def _report_end(self, stack: NodeStack, key: tuple[str, int]) -> None:
        """Say why a stack ended. Without any other, the pool has ended too."""
        if stack.error is None and not stack.leaving:
            del self.stacks[key]
        why = stack.describe_loss()
        if stack.error is not None:
            why = f"the stack on node {stack.name} did not start: {stack.error.message}"
            self._tell(f"warning: {why}")
        elif not stack.leaving:
            left = sum(other.serves and not other.leaving for other in self.stacks.values())
            self._tell(f"warning: {why}; {left} are left and take its rollouts")
        self._in_background(self._notify())
        if (self._up or stack.error is None) and not any(other.serves for other in self.stacks.values()):
            self.reason += f"; the last one: {why}"
            self.peer.abort()

    def _tell(self, line: str) -> None:
        self.peer.tell("progress", message=line)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _change(self) -> None:
        """Wait until a stack may have become free, or for a second."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0), self._changed:
                await self._changed.wait()

    async def _notify(self, waiting: int | None = None) -> None:
        """Wake so many that wait for a change; `None`: all."""
        async with self._changed:
            self._changed.notify_all() if waiting is None else self._changed.notify(waiting)

    def _begin_to_stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        if tasks := [*self._tasks]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if self._ray is not None:
            await asyncio.to_thread(detach)


def _failure_reply(message: dict[str, Any], error: GymgateError) -> Reply:
    """Return the record of a rollout that no daemon reported."""
    names = {name: message[name] or "" for name in ("environment", "agent")}
    rollout = failed_rollout(error, id=message["rollout_id"], **names)
    return Reply(None, codec.dumps({**rollout.model_dump(mode="json"), "requests": []}))
