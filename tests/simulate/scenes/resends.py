"""Agents that speak three dialects, plain and streamed, and send again what was not answered, marked in one way or another."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

import simloom
from invariants import Ledger
from parts import HTTPClient, HTTPEndpoint, HTTPFailure, Request, StreamTimes, codec
from universes import Scene

from scenes.faults import ended, happen, one_of, seconds
from scenes.gateway import attempts_of
from scenes.gateways import gateway_on
from scenes.speech import answer_in, answer_of, question_in, question_of
from scenes.web import serve

ROLLOUTS, TURNS = 3, 3
PORT = 8000
TIMEOUT_S = 60.0
RESENDS = 3
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
MARKS = ("by nothing", "by a count", "by a key")


async def play(world: Any, ledger: Ledger) -> None:
    inside, agents = world.host("gateway"), world.host("agents")
    policies = [world.host(f"policy{n}") for n in range(ROLLOUTS)]
    upstream = Counter[str]()
    """Calls that a policy refused, by policy."""
    answers: defaultdict[str, list[str]] = defaultdict(list)
    """By question."""
    used: set[str] = set()

    def policy_of(own: str, dialect: Any) -> Any:
        async def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            name = question_in(body, dialect)
            ledger.reached(name.partition("/")[0], own)
            if simloom.sometimes("policy fails", 10):
                upstream[own] += 1
                ledger.reasons[name] += 1
                return 503, {"error": {"message": "no luck"}}
            ledger.paid[name] += 1
            text = f"answer {ledger.paid[name]} to {name}"
            answers[name].append(text)
            await asyncio.sleep(seconds("policy", 2.0))
            return 200, answer_of(text, dialect)

        return answer

    async def roll_out(own: str, upstream_dialect: Any) -> None:
        async with HTTPClient() as client:
            endpoint = HTTPEndpoint(
                base_url=f"http://{own}:{PORT}/v1", model=own, dialect=upstream_dialect, timeout_s=TIMEOUT_S
            )
            route = gateway.open(endpoint, rollout_id=own)
            for turn in range(TURNS):
                name = f"{own}/{turn}"
                if simloom.sometimes("asked twice at once", 30):
                    ledger.reasons[name] += 1
                    # Of two equal calls whose answers were lost, a count does not say whose it repeats.
                    marks = [one_of("marked", ("by nothing", "by a key")) for _ in range(2)]
                else:
                    marks = [one_of("marked", MARKS)]
                twins = [dialogue(client, route, own, name, "'" * n, mark) for n, mark in enumerate(marks)]
                await asyncio.gather(*twins)
            await route.close()
            for call in route.calls:
                assert call.request is not None
                ledger.recorded[question_in(call.request, call.dialect)] += attempts_of(call)

    async def dialogue(client: HTTPClient, route: Any, own: str, name: str, twin: str, mark: str) -> None:
        """Ask a question until it is answered. Equal questions at once are two."""
        dialect = one_of("dialect", sorted(PATHS))
        simloom.reached(f"{dialect}, marked {mark}")
        asked, body = (
            f"{name}{twin}",
            question_of(name, own, dialect, stream=simloom.sometimes("streamed", 40)),
        )
        ledger.asked.add(asked)
        request = Request(f"{route.base_url}/{PATHS[dialect]}")
        for attempt in range(1 + RESENDS):
            patience = seconds("patience", 3.0) if simloom.sometimes("agent gives up", 10) else TIMEOUT_S
            headers = f"Idempotency-Key: {asked}\r\n".encode() if mark == "by a key" else b""
            if attempt:
                simloom.reached("sent again")
                if mark != "by nothing":
                    headers += b"x-stainless-retry-count: %d\r\n" % attempt
            try:
                response = await client.send(request, codec.dumps(body), headers=headers, timeout_s=patience)
            except (HTTPFailure, TimeoutError) as error:
                # What was written to a connection, and lost with it, only a mark asks for again; and only a key does while
                # the gateway has not noticed that the connection is lost.
                ledger.reasons[name] += mark == "by nothing" or (
                    mark != "by a key" and isinstance(error, TimeoutError)
                )
                ledger.excuses[asked] += 1
                continue
            text = answer_in(response.body, dialect, stream=body.get("stream", False))
            if response.status == 200 and text is not None:
                if text in used:
                    ledger.wrong.append(f"{asked} got an answer that another call had got: {text}")
                used.add(text)
                ledger.deserved[asked] = text if text in answers[name] else None
                return ledger.ended(asked, text)
            ledger.excuses[asked] += upstream[own] + ledger.excuses["resets"]
            break
        return ledger.ended(asked, failed="no answer")

    def reset_policy(number: int) -> Any:
        def fault() -> None:
            ledger.excuses["resets"] += 1
            for turn in range(TURNS):
                ledger.reasons[f"policy{number}/{turn}"] += 2  # each of two equal calls
            world.net.reset_connections(inside, policies[number])

        return fault

    dialects = {host: one_of("dialect of the policy", ["chat", "responses"]) for host in policies}
    serving = [
        host.spawn(lambda host=host: serve(host.name, PORT, policy_of(host.name, dialects[host])))
        for host in policies
    ]
    await asyncio.sleep(0.01)
    times = StreamTimes(hold_s=0.7, ping_s=0.3)
    async with gateway_on(inside, ledger, stream_times=times) as gateway:
        tasks = {
            agents.spawn(lambda host=host: roll_out(host.name, dialects[host])): agents for host in policies
        }
        await happen(
            {
                "agents' connections reset": lambda: world.net.reset_connections(agents, inside),
                "policy 0's connections reset": reset_policy(0),
                "policy 1's connections reset": reset_policy(1),
            },
            most=6,
            over_s=12.0,
        )
        await ended(tasks)
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)


SCENE = Scene(
    "resends",
    play,
    (
        "policy fails",
        "sent again",
        "streamed",
        "agent gives up",
        "asked twice at once",
        "agents' connections reset",
        "policy 0's connections reset",
        "policy 1's connections reset",
        *(f"{dialect}, marked {mark}" for dialect in PATHS for mark in MARKS),
    ),
    deadline_s=600,
    seeds=(50685,),  # a call cancelled while the gateway repeated it did not record that it was repeated
)
