"""The connection between SDK process and daemon: calls in both directions, given up, under crashes, resets and partitions."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import simloom
from invariants import Ledger
from parts import Peer, Reply, StackLostError
from universes import Scene

from scenes.faults import ended, happen, seconds, split

CLIENTS, CALLS = 3, 4
PORT = 7000
UNNOTICED_S = 0.1
"""For a cancel to reach the daemon."""
CONNECTED_S = 0.5
"""By then each client has its connection."""


async def play(world: Any, ledger: Ledger) -> None:
    daemon, hosts = world.host("daemon"), [world.host(f"client{n}") for n in range(CLIENTS)]
    ends: list[Peer] = []
    shaken = Counter[Any]()
    """Times that the connections of a client were broken."""
    given_up: dict[str, float] = {}
    """When, for calls that reach the daemon without a partition; by client, for those whose connection was broken."""

    def accept() -> Peer:
        async def work(message: dict[str, Any], body: bytes) -> Reply:
            name = message["name"]
            ledger.paid[name] += 1
            await asyncio.sleep(seconds("work", 1.0))
            answer = await peer.exchange("policy", {"name": name}, body) if message["asks"] else Reply(0)
            ledger.deserved[name] = (f"{name} done", answer.body)
            when = min(given_up.get(name, math.inf), given_up.get(name.partition("/")[0], math.inf))
            if asyncio.get_running_loop().time() > when + UNNOTICED_S:
                ledger.wrong.append(f"the work of {name} went on after its caller gave it up")
            return Reply(f"{name} done", answer.body)

        peer = Peer({"work": work}, on_lost=lambda: ends.remove(peer))
        ends.append(peer)
        return peer

    async def serve() -> None:
        async with await asyncio.get_running_loop().create_server(accept, "daemon", PORT) as server:
            await server.serve_forever()

    async def call(peer: Peer, own: str, number: int) -> None:
        name = f"{own}/{number}"
        ledger.asked.add(name)
        asking = {"name": name, "asks": simloom.sometimes("asks back", 50)}
        try:
            async with asyncio.timeout(None) as patience:
                if simloom.sometimes("call given up", 25):
                    patience.reschedule(asyncio.get_running_loop().time() + seconds("patience", 1.0))
                reply = await peer.exchange("work", asking, name.encode())
            ledger.ended(name, (reply.value, reply.body))
        except TimeoutError:
            ledger.excuses[name] += 1
            ledger.ended(name, failed="given up")
            if own != hosts[0].name:  # it may be parted from the daemon
                given_up[name] = asyncio.get_running_loop().time()
        except StackLostError:
            ledger.excuses[name] += shaken[own]
            ledger.ended(name, failed="lost")

    async def use(own: str) -> None:
        async def policy(message: dict[str, Any], body: bytes) -> Reply:
            ledger.reached(message["name"].partition("/")[0], own)
            await asyncio.sleep(seconds("policy", 0.5))
            return Reply(None, body + b" answered")

        peer = Peer({"policy": policy})
        try:
            await asyncio.get_running_loop().create_connection(lambda: peer, "daemon", PORT)
        except ConnectionError:
            return
        async with asyncio.TaskGroup() as calls:
            for number in range(CALLS):
                calls.create_task(call(peer, own, number))
                await asyncio.sleep(seconds("next call", 0.2))
        peer.close()
        assert not peer.waits

    def shake(number: int, do: Any) -> Any:
        def fault() -> None:
            shaken[f"client{number}"] += 1
            if (now := asyncio.get_running_loop().time()) > CONNECTED_S:
                given_up.setdefault(f"client{number}", now)
            do()

        return fault

    def crash(host: Any) -> Any:
        def fault() -> None:
            for name in [name for name in ledger.asked if name.startswith(host.name)]:
                ledger.asked.discard(name)
            given_up.setdefault(host.name, asyncio.get_running_loop().time())
            host.crash()

        return fault

    def crash_daemon() -> None:
        shaken.update(host.name for host in hosts)
        daemon.crash()

    serving = daemon.spawn(serve)
    await asyncio.sleep(0.01)
    tasks = {host.spawn(lambda own=host.name: use(own)): host for host in hosts}
    await happen(
        {
            "daemon crash": crash_daemon,
            "client crash": crash(hosts[2]),
            "partition": lambda: split(world, daemon, hosts[0], for_s=1.0),
            "reset": shake(1, lambda: world.net.reset_connections(daemon, hosts[1])),
        },
        most=3,
        over_s=3.0,
    )
    await ended(tasks)
    await asyncio.sleep(2.0)  # for what was given up to be cancelled at the other end
    ledger.left["connections at the daemon"] = lambda: 0 if daemon.crashed else len(ends)
    serving.cancel()


SCENE = Scene(
    "rpc",
    play,
    ("daemon crash", "client crash", "partition", "reset", "call given up", "asks back"),
    deadline_s=20,
)
