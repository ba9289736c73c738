"""The gateway between agents, which send again what was not answered, and policies behind aiohttp; connections are reset."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import simloom
from aiohttp import web
from invariants import Ledger, within
from parts import HTTPClient, HTTPEndpoint, HTTPFailure, Request, codec
from universes import Scene

from scenes.faults import ended, happen, seconds
from scenes.gateways import gateway_on

ROLLOUTS, TURNS = 3, 4
PORT = 8000
TIMEOUT_S = 60.0
RESENDS = 3


async def play(world: Any, ledger: Ledger) -> None:
    loop = asyncio.get_running_loop()
    inside, agents = world.host("gateway"), world.host("agents")
    policies = [world.host(f"policy{n}") for n in range(ROLLOUTS)]
    upstream = Counter[str]()
    """Calls in which a policy's connection was reset, or the policy refused."""

    async def serve(own: str) -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            body = codec.loads_own(await request.read())
            name = body["messages"][-1]["content"]
            ledger.reached(name.partition("/")[0], own)
            if simloom.sometimes("policy fails", 10):
                ledger.reasons[name] += 1
                return web.Response(status=503)
            ledger.paid[name] += 1
            ledger.deserved[name] = text = f"answer {ledger.paid[name]} to {name}"
            await asyncio.sleep(seconds("policy", 2.0))
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            return web.json_response(
                {"id": name, "object": "chat.completion", "created": 0, "model": own, "choices": [choice]}
            )

        server = web.Server(answer, access_log=None)
        try:
            async with await loop.create_server(server, own, PORT) as listening:
                await listening.serve_forever()
        finally:
            await server.shutdown(1)

    async def roll_out(own: str, opened: list[Any]) -> None:
        async with HTTPClient() as client:
            route = gateway.open(HTTPEndpoint(base_url=f"http://{own}:{PORT}/v1", model=own), rollout_id=own)
            opened.append(route)
            request = Request(f"{route.base_url}/chat/completions")
            for turn in range(TURNS):
                await ask(client, request, own, f"{own}/{turn}")
            await route.close()
            for call in route.calls:
                assert call.request is not None
                ledger.recorded[call.request["messages"][-1]["content"]] += attempts_of(call)

    async def ask(client: HTTPClient, request: Request, own: str, name: str) -> None:
        """Ask as NeMo Gym's client does, which sends a request again, or as the OpenAI SDK, which marks it then."""
        ledger.asked.add(name)
        body = codec.dumps({"model": own, "messages": [{"role": "user", "content": name}]})
        is_marked = simloom.sometimes("marked", 50)
        key = f"Idempotency-Key: {name}\r\n".encode() if is_marked else b""
        for attempt in range(1 + RESENDS):
            if attempt:
                simloom.reached("sent again")
            try:
                with within(TIMEOUT_S, name):
                    response = await client.send(request, body, headers=key, timeout_s=TIMEOUT_S)
            except HTTPFailure:
                # Of an answer that was written to a connection and lost with it, only a marked request is a repetition.
                ledger.reasons[name] += not is_marked
                ledger.excuses[name] += 1
                continue
            if response.status == 200:
                ledger.ended(name, codec.loads_own(response.body)["choices"][0]["message"]["content"])
                return
            ledger.excuses[name] += upstream[own] + ledger.reasons[name]
            break
        ledger.ended(name, failed="no answer")

    def reset_policy(number: int) -> Any:
        def fault() -> None:
            upstream[f"policy{number}"] += 1
            for turn in range(TURNS):
                ledger.reasons[f"policy{number}/{turn}"] += 1
            world.net.reset_connections(inside, policies[number])

        return fault

    serving = [host.spawn(lambda name=host.name: serve(name)) for host in policies]
    await asyncio.sleep(0.01)
    opened = list[Any]()
    async with gateway_on(inside, ledger) as gateway:
        tasks = {agents.spawn(lambda own=host.name: roll_out(own, opened)): agents for host in policies}
        await happen(
            {
                "agents' connections reset": lambda: world.net.reset_connections(agents, inside),
                "policy 0's connections reset": reset_policy(0),
                "policy 1's connections reset": reset_policy(1),
            },
            most=6,
            over_s=15.0,
        )
        await ended(tasks)
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)


def attempts_of(call: Any) -> int:
    """Return how often the endpoint was asked for a call, by its record."""
    attempts: int = 1 + call.details.get("retries", 0)
    return attempts


SCENE = Scene(
    "gateway",
    play,
    (
        "policy fails",
        "sent again",
        "marked",
        "agents' connections reset",
        "policy 0's connections reset",
        "policy 1's connections reset",
    ),
    deadline_s=300,
)
