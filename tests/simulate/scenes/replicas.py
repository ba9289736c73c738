"""Replicas of one policy that hang, answer late, send an answer too many, ask for time, crash and come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import simloom
from invariants import Ledger, Violation
from parts import Gateway, HTTPEndpoint, PolicyError, codec
from universes import Scene

from scenes.faults import ended, happen, one_of, seconds
from scenes.http import Server
from scenes.speech import answer_of, question_in, question_of

REPLICAS, ROLLOUTS, TURNS = 3, 4, 4
PORT = 8000
TIMEOUT_S = 6.0
LONGEST_COOL_DOWN_S = 8.0
BEHAVIOURS = [
    *["answers"] * 6,
    "answers late",
    "hangs",
    "sends an answer too many",
    "asks for time",
    "refuses",
    "drops the connection",
]


class Replica(Server):
    """Answers chat requests as it pleases, or well from `well` on."""

    well = False

    async def answer(self, body: bytes) -> None:
        name = question_in(codec.loads_own(body), "chat")
        behaviour = "answers" if Replica.well else one_of("behaviour", BEHAVIOURS)
        simloom.reached(behaviour)
        if behaviour != "answers":
            self.breaks(self.name)
        if behaviour == "hangs":
            return
        await asyncio.sleep(TIMEOUT_S + 1.0 if behaviour == "answers late" else seconds("answer", 2.0))
        if behaviour == "drops the connection":
            self.transport.abort()
        status = {"asks for time": "429 Slow down", "refuses": "503 Full"}.get(behaviour, "200 OK")
        text = f"{self.name}, request {self.requests}, to {name}"
        if status == "200 OK":
            self.ledger.paid[name] += 1
            self.ledger.deserved[name] = text
        content = codec.dumps(answer_of(text, "chat") if status == "200 OK" else {"error": behaviour})
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\nContent-Type: application/json\r\n\r\n"
        )
        if self.transport.is_closing():
            return
        self.transport.write(head.encode() + content)
        if behaviour == "sends an answer too many":
            self.transport.write(head.encode() + codec.dumps(answer_of("too many", "chat")))


async def play(world: Any, ledger: Ledger) -> None:
    inside, hosts = world.host("gateway"), [world.host(f"replica{n}") for n in range(REPLICAS)]
    servers: dict[str, list[Replica]] = {host.name: [] for host in hosts}
    happened = Counter[str]()
    Replica.well = False

    def accept(name: str) -> Replica:
        servers[name].append(Replica(name, ledger, lambda name: happened.update([name])))
        return servers[name][-1]

    async def serve(name: str) -> None:
        async with await asyncio.get_running_loop().create_server(lambda: accept(name), name, PORT) as server:
            await server.serve_forever()

    async def ask(backend: Any, name: str) -> None:
        def note(retries: int) -> None:
            ledger.reasons[name] += retries > 0

        ledger.asked.add(name)
        before = happened.total()
        try:
            async with asyncio.timeout(None) as patience:
                if not Replica.well and simloom.sometimes("call given up", 10):
                    patience.reschedule(asyncio.get_running_loop().time() + seconds("patience", 5.0))
                answer = await backend.call(question_of(name, "m", "chat"), note=note)
        except PolicyError as error:
            ledger.excuses[name] += happened.total() - before + sum(host.crashed for host in hosts)
            return ledger.ended(name, failed=error.message)
        except TimeoutError:
            ledger.excuses[name] += 1
            return ledger.ended(name, failed="given up")
        return ledger.ended(name, answer.body["choices"][0]["message"]["content"])

    async def roll_out(number: int) -> None:
        backend = prepared.backend()
        for turn in range(TURNS):
            await ask(backend, f"rollout{number}/{turn}")
            await asyncio.sleep(seconds("tool", 2.0))

    async def use() -> None:
        async with gateway:
            async with asyncio.TaskGroup() as rollouts:
                for number in range(ROLLOUTS):
                    rollouts.create_task(roll_out(number))
            await faults
            for host in hosts:
                if host.crashed:
                    host.restart()
            Replica.well = True
            await asyncio.sleep(TIMEOUT_S + LONGEST_COOL_DOWN_S)
            await check_that_all_serve()

    async def check_that_all_serve() -> None:
        served = {url: state["served"] for url, state in gateway.replicas.items()}
        for turn in range(2):  # the first call to each that was away tries it
            asking = (ask(prepared.backend(), f"after all/{turn}.{n}") for n in range(2 * REPLICAS))
            await asyncio.gather(*asking)
        for url, state in gateway.replicas.items():
            if state["in_flight"] or not state["healthy"] or state["served"] == served[url]:
                raise Violation(f"{url} is well, and after 12 calls its state is {state}")

    def crash(host: Any) -> Any:
        def fault() -> None:
            happened[host.name] += 1
            if not host.crashed:
                host.crash()
            else:
                simloom.reached("comes back")
                host.restart()

        return fault

    for host in hosts:
        host.spawn(lambda name=host.name: serve(name))
    await asyncio.sleep(0.01)
    urls = [f"http://{host.name}:{PORT}/v1" for host in hosts]
    endpoint = HTTPEndpoint(base_url=urls[0], replicas=urls[1:], model="m", timeout_s=TIMEOUT_S)
    gateway = Gateway()
    prepared = gateway.prepare(endpoint)
    kinds = {f"{host.name} crashes or comes back": crash(host) for host in hosts}
    faults = asyncio.create_task(happen(kinds, most=6, over_s=20.0))
    await ended({inside.spawn(use): inside})
    ledger.left["connections to replicas"] = lambda: len(gateway._client._open)
    for host in hosts:
        host.crash()


SCENE = Scene(
    "replicas",
    play,
    (*sorted(set(BEHAVIOURS)), "call given up", "comes back"),
    deadline_s=900,
    seeds=(3,),  # while each replica was away and tried by another call, a call failed inside the gateway
)
