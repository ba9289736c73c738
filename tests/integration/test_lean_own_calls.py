"""An agent of a lean server that calls itself in memory sees what it sees over a socket: the same calls in one of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import SUPPORTED_NEMO_GYM
from support.lean import Served, both, comparable, http, logs_of

pytestmark = pytest.mark.gym

PREFIX = "/ng-rollout/abc-1"
CALLS: dict[str, dict[str, Any]] = {
    "a call": {},
    "within a rollout": {"path": f"{PREFIX}/v1/responses"},
    "within a rollout whose tokens are captured": {"path": f"{PREFIX}/training-token-capture/v1/responses"},
    "of no route": {"path": "/nowhere"},
    "a route that allows another method": {"path": "/events"},
    "an exception": {"mode": "boom"},
    "an exception that is raised again": {"mode": "boom", "checked": True},
    "megabytes both ways": {"mode": "big", "text": "y" * 2_000_000},
    "cookies": {"mode": "cookies", "cookies": {"a": "b", "odd": 'c "d"; e'}},
    "a redirect that asks again": {"mode": "redirect", "status": 302},
    "a redirect that sends again": {"mode": "redirect", "status": 307},
    "a stream": {"mode": "stream"},
    "a background task": {"mode": "background"},
    "a variable of the context": {"mode": "variable"},
    "a variable of the context again": {"mode": "variable"},
}


@pytest.fixture(params=SUPPORTED_NEMO_GYM, scope="module")
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def agents(version: str, tmp_path: Path) -> AsyncIterator[tuple[Served, Served]]:
    async with both(version, tmp_path, "agent.py", "responses_api_agents") as pair:
        assert json.loads(pair[1].noted.read_text()) == {}
        yield pair


async def sockets(agent: Served) -> int:
    return int((await agent.ask(http("GET", "/sockets"))).rpartition(b"\r\n")[2])


@pytest.mark.parametrize("path", ["/call", "/call_elsewhere"])
async def test_calls_have_the_same_answers(agents: tuple[Served, Served], path: str) -> None:
    stock, lean = agents
    for name, call in CALLS.items():
        expected, answer = [await agent.ask(http("POST", path, call)) for agent in agents]
        assert comparable(answer, lean.port) == comparable(expected, stock.port), name
        if call.get("mode") == "background":
            for agent in agents:
                await agent.until("background ran")
        logs = await logs_of(agents)
        assert logs[1] == logs[0], name


async def test_only_a_call_over_a_socket_takes_descriptors(agents: tuple[Served, Served]) -> None:
    taken = []
    for agent in agents:
        await agent.ask(http("POST", "/call", {}))
        before = await sockets(agent)
        calls = [asyncio.create_task(agent.ask(http("POST", "/call", {"mode": "wait"}))) for _ in range(10)]
        await agent.until(*["wait begins"] * 10)
        taken.append(await sockets(agent) - before)
        await asyncio.gather(*calls)
    # The caller's connection, and without lean servers both ends of the agent's own. One of these was there already.
    assert taken in ([28, 10], [30, 10])


async def test_a_caller_that_gives_up_cancels_as_over_a_socket(
    agents: tuple[Served, Served], version: str
) -> None:
    for agent in agents:
        answer = await agent.ask(http("POST", "/call_in_time", {"mode": "wait"}))
        assert answer.endswith(b'"late"')
        last = {"0.7.0": "wait cancelled", "0.6.0": "wait went on"}[version]
        async with asyncio.timeout(20):
            while last not in await agent.events():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert {*await agent.events()} == {"wait begins", "the caller gave up", last}
    logs = await logs_of(agents)
    assert logs[1] == logs[0]


async def test_a_rollout_that_is_hung_up_cancels_the_call_under_it(
    agents: tuple[Served, Served], version: str
) -> None:
    for agent in agents:
        _, writer = await agent.open(http("POST", "/call", {"mode": "wait"}))
        await agent.until("wait begins")
        writer.close()
        await agent.until({"0.7.0": "wait cancelled", "0.6.0": "wait went on"}[version])
    logs = await logs_of(agents)
    assert logs[1] == logs[0]


async def test_a_broken_answer_is_an_error_to_the_caller(agents: tuple[Served, Served]) -> None:
    stock, lean = [
        comparable(await agent.ask(http("POST", "/call", {"mode": "cut"})), agent.port) for agent in agents
    ]
    assert lean == stock
    assert b"500 Internal Server Error" in lean


async def test_a_thousand_calls_at_once_keep_apart(agents: tuple[Served, Served]) -> None:
    for agent in agents:
        answer = await agent.ask(http("POST", "/call_often", {"count": 1000}))
        assert answer.endswith(b"1000")
