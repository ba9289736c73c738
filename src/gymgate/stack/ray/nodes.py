"""A stack on a node of a Ray cluster: Ray's calls carry the bytes between its daemon and the caller.

Everything that a daemon is told and answers, keys included, crosses as the arguments and answers of actor calls of at most
`CHUNK` bytes. Ray hands those from process to process, and puts only larger ones into its object store.

Why not an actor that runs rollouts: a working sketch of one was longer, 443 lines of code instead of 379 with the pool. Calls
of callables, errors, cancellation, progress and the notice of a daemon's end took methods of their own, which the daemon's
protocol already has. CPU time for a rollout was the same.

Why not a TCP port on the node: that needs a port open between the nodes, a certificate that the actor makes (with a library
that Ray does not bring) and hands back, and still something that passes the bytes on to the daemon. Of the 48 lines of
`Tunnel` hardly any would be left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from gymgate.core.config import StackConfig
from gymgate.core.errors import ConfigError, GymgateError, MissingExtraError, from_wire
from gymgate.core.extras import install_command
from gymgate.stack.client.identity import identity_of
from gymgate.stack.client.leases import current_leases

CONNECT_S = 10.0
"""For the cluster's address to be reached."""
CHUNK = 64 * 1024
"""Bytes of one call. Ray sends up to 100 KiB without its object store."""
READ_S = 20.0
"""Seconds that a call for bytes waits for some."""
SILENT_S = 60.0
"""Seconds after which a caller that asks for no bytes counts as gone."""


class Relay:
    """The actor on a node. Each link is a connection of one caller to the daemon of one stack there."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def open(self, link: str, config: Mapping[str, Any], identity: str) -> dict[str, Any] | None:
        """Connect to the stack's daemon, which is started if none answers; `None`, or why that failed.

        `config` has no keys. `identity` stands for those that the caller has, and names the daemon together with what
        decides on this node. Errors travel as dicts, because Ray would rebuild exceptions wrongly.
        """
        leases = current_leases()
        try:
            described = StackConfig.model_validate(config)
            here = await asyncio.to_thread(identity_of, described, identity.encode())
            address = await asyncio.to_thread(leases.address, described, here)
            sock, _ = await asyncio.to_thread(leases.connect, address)
        except GymgateError as error:
            return error.to_wire()
        self._links[link] = await asyncio.open_unix_connection(sock=sock, limit=CHUNK)
        self._expect(link)
        return None

    async def read(self, link: str) -> bytes | None:
        """Return what the daemon sends, `None` if it sends nothing for a while, and `b""` at the end of the link."""
        if link not in self._links:
            return b""
        self._timers.pop(link).cancel()
        try:
            async with asyncio.timeout(READ_S):
                return await self._links[link][0].read(CHUNK)
        except TimeoutError:
            return None
        except OSError:
            return b""
        finally:
            self._expect(link)

    async def write(self, link: str, data: bytes) -> None:
        """Send bytes to the daemon. Returns when it takes more; bytes for a link that has ended are dropped."""
        if link in self._links:
            writer = self._links[link][1]
            writer.write(data)
            with contextlib.suppress(OSError):
                await writer.drain()

    async def close(self, link: str) -> bool:
        """End a link; whether no other one is left."""
        self._end(link)
        return not self._links

    def _expect(self, link: str) -> None:
        """End the link unless its caller asks for bytes in time: it may have died without a word."""
        if link in self._links:
            self._timers[link] = asyncio.get_running_loop().call_later(SILENT_S, self._end, link)

    def _end(self, link: str) -> None:
        if (timer := self._timers.pop(link, None)) is not None:
            timer.cancel()
        if (streams := self._links.pop(link, None)) is not None:
            streams[1].close()


class Tunnel:
    """The caller's end of a link: a socket, and a task that carries its bytes."""

    def __init__(self, actor: Any, link: str) -> None:
        self.actor = actor
        self.link = link
        self.reason = "its daemon is gone"
        """Why the link ended."""
        self._carrying: asyncio.Task[None] | None = None

    async def open(self, config: Mapping[str, Any], identity: str) -> socket.socket:
        """Return a socket to the daemon on the node. Raises the error that kept it from starting, and Ray's own."""
        failure = await self.actor.open.remote(self.link, config, identity)
        if failure is not None:
            raise from_wire(failure)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=theirs, limit=CHUNK)
        self._carrying = asyncio.create_task(self._carry(reader, writer))
        return ours

    async def close(self) -> None:
        """Stop carrying."""
        if self._carrying is not None:
            self._carrying.cancel()
            await asyncio.wait([self._carrying])

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        directions = [asyncio.create_task(self._send(reader)), asyncio.create_task(self._receive(writer))]
        try:
            done, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for direction in done:
                if (error := direction.exception()) is not None:
                    self.reason = type(error).__name__
        finally:
            for direction in directions:
                direction.cancel()
            writer.close()

    async def _send(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK):
            await self.actor.write.remote(self.link, data)

    async def _receive(self, writer: asyncio.StreamWriter) -> None:
        while (data := await self.actor.read.remote(self.link)) != b"":
            if data is not None:
                writer.write(data)
                await writer.drain()


def start_relay(ray: Any, node_id: str, cpus: float, name: str | None) -> Any:
    """Start the actor on a node, where it takes so many CPUs; one that has a name may be there already."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    shared = {"name": name, "namespace": "gymgate", "get_if_exists": True} if name else {}
    options = {
        "num_cpus": cpus,
        "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
        "max_concurrency": 1000,
        **shared,
    }
    return ray.remote(Relay).options(**options).remote()


_attaching = threading.Lock()
_attached = 0
"""Pools of this process, if gymgate connected it to the cluster."""
shared_actors: list[Any] = []
"""Actors of this process that others use too: Ray ends an actor when its process forgets it."""


def require_ray() -> None:
    """Raise `MissingExtraError` if Ray is not installed. Does not import it."""
    if find_spec("ray") is None:
        raise MissingExtraError(f"a Ray cluster needs Ray: {install_command('ray')}")


def attach(address: str) -> Any:
    """Connect this process to the cluster, unless it is connected to one, and return Ray.

    Raises `MissingExtraError` without Ray and `ConfigError` for an address where no cluster answers.
    """
    global _attached
    require_ray()
    ray = importlib.import_module("ray")
    with _attaching:
        if not ray.is_initialized():
            try:
                _refuse_silence(address)
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ConfigError(f"no Ray cluster answers at {address!r}: {reason}") from error
            _attached = 1
        elif _attached:
            _attached += 1
    return ray


def detach() -> None:
    """Disconnect this process with its last pool, if gymgate connected it."""
    global _attached
    with _attaching:
        if _attached == 1 and not shared_actors:
            importlib.import_module("ray").shutdown()
        _attached = max(0, _attached - 1)


def _refuse_silence(address: str) -> None:
    """Raise `ConnectionError` if nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def nodes_of(ray: Any) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the cluster's nodes, and the ids of those that are being drained."""
    sdk = importlib.import_module("ray.autoscaler.v2.sdk")  # it needs no autoscaler
    status = sdk.get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = (*status.active_nodes, *status.idle_nodes)
    draining = {node.node_id for node in nodes if node.node_status == "DRAINING"}
    return [node for node in ray.nodes() if node["Alive"]], draining
