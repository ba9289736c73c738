"""A session whose resources server is scripted: what the end of an episode may do to the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gymgate.integrations.openenv import env_server as module
from gymgate.integrations.openenv.env_server import Game, NeMoGymAction, NeMoGymEnvironment
from gymgate.integrations.openenv.episode import GymnasiumEpisode
from gymgate.integrations.openenv.stepwise import StepwiseEnvironment
from gymgate.rollouts.row import make_row

ROW = make_row({"responses_create_params": {"input": "hello"}}, "rows.jsonl", 1)


class Resources:
    """A gymnasium environment that wants to be told of an episode's end, which fails or is never answered."""

    def __init__(self) -> None:
        self.resets = self.closes = 0
        self.cookies: dict[str, str] = {}
        self.answers = asyncio.Event()
        self.answers.set()
        self.close_came = asyncio.Event()

    async def reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        answer = web.json_response({"observation": "?", "info": {"supports_explicit_close": True}})
        answer.set_cookie("session", f"s {self.resets}")
        answer.set_cookie("other", "o", httponly=True)
        return answer

    async def close(self, request: web.Request) -> web.Response:
        self.closes += 1
        self.cookies = dict(request.cookies)
        self.close_came.set()
        await self.answers.wait()
        return web.Response(status=500, text="no such session")


class Stack:
    """As far as a session asks one."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def status(self) -> dict[str, Any]:
        return {"environments": {"e": {"state": "up", "servers": {"r": {"port": self.port}}}}}


@pytest.fixture
async def resources() -> AsyncIterator[tuple[Resources, Game]]:
    made = Resources()
    app = web.Application()
    app.router.add_post("/reset", made.reset)
    app.router.add_post("/close", made.close)
    async with TestServer(app) as server:
        stack: Any = Stack(server.port or 0)
        stepwise = StepwiseEnvironment("e", "a", "r", GymnasiumEpisode, 10)
        game = Game(stack, stepwise, [ROW], 30.0, asyncio.get_running_loop())
        yield made, game
        await asyncio.sleep(0)  # for what `close` has begun
        await game.wait_for_ends()


async def test_a_close_that_fails_does_not_fail_the_next_reset(resources: tuple[Resources, Game]) -> None:
    server, game = resources
    session = NeMoGymEnvironment(game)
    await session.reset_async()
    assert (await session.reset_async()).messages[-1]["content"] == "?"
    assert (server.resets, server.closes) == (2, 1)
    assert server.cookies == {"session": "s 1", "other": "o"}
    session.close()


async def test_a_close_that_is_not_answered_holds_up_the_next_reset_for_a_while(
    resources: tuple[Resources, Game], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    server, game = resources
    server.answers.clear()
    session = NeMoGymEnvironment(game)
    await session.reset_async()
    async with asyncio.timeout(20):
        await session.reset_async()
    server.answers.set()
    session.close()


async def test_the_event_loop_goes_on_when_it_closes_a_session(resources: tuple[Resources, Game]) -> None:
    server, game = resources
    session = NeMoGymEnvironment(game)
    await session.reset_async()
    session.close()  # as OpenEnv does for a request without a session
    async with asyncio.timeout(5):
        await server.close_came.wait()
    with pytest.raises(Exception, match="reset"):
        await session.step_async(NeMoGymAction(type="message", content="x"))
