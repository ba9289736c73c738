"""What a connection to the daemon holds for as long as it lives: nothing of a route that is closed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gymgate.config import HTTPEndpoint, StackConfig
from gymgate.errors import StackLostError
from gymgate.stack.client import Connection, Stack
from gymgate.stack.daemon import Daemon
from gymgate.stack.launch import DaemonAddress
from gymgate.stack.running import RunningStack
from gymgate.stack.session import Session
from support.upstream import Seen, chat_answer, upstream

ENDPOINT = HTTPEndpoint(base_url="http://127.0.0.1:9/v1")
CONFIG = StackConfig(environments=("none",))


class Up(Daemon):
    """A daemon whose stack has its gateway, and no environments."""

    alone: RunningStack

    @property
    def running(self) -> RunningStack:
        return self.alone


def taken(connection: Connection) -> Callable[[], Coroutine[Any, Any, Connection]]:
    async def take() -> Connection:
        return connection

    return take


@asynccontextmanager
async def joined(directory: Path) -> AsyncIterator[tuple[Stack, Connection, Session]]:
    """A client's stack, its connection, and the daemon's end of that."""
    with socket.socket() as listener:
        daemon = Up(listener, directory / "s.sock", directory, os.getpid())
        daemon.alone = RunningStack(CONFIG, directory, print)
        async with daemon.alone.gateway:
            session, connection = (
                Session(daemon),
                Connection(DaemonAddress(directory / "s.sock", directory), None),
            )
            loop = asyncio.get_running_loop()
            for peer, end in zip((session.peer, connection.peer), socket.socketpair(), strict=True):
                end.setblocking(False)
                await loop.create_unix_connection(lambda peer=peer: peer, sock=end)
            try:
                stack = await Stack._open(
                    CONFIG, taken(connection), lambda _: asyncio.sleep(0), reconnect=False
                )
                yield stack, connection, session
            finally:
                connection.peer.abort()
                await session.peer.lost.wait()


def held(thing: object) -> dict[str, Any]:
    """What is in its dictionaries."""
    return {name: value for name, value in vars(thing).items() if isinstance(value, dict) and value}


async def test_a_closed_route_leaves_no_name(tmp_path: Path) -> None:
    """Whichever way it is closed."""
    async with joined(tmp_path) as (stack, connection, session):
        gateway = session.daemon.running.gateway
        async with await stack.open_route(ENDPOINT) as route:
            assert [found.key for found in gateway.routes.values()] == [route.key]
        closed, forgotten = await stack.open_route(ENDPOINT), await stack.open_route(ENDPOINT)
        await connection.peer.call("close_route", name=closed._name)
        connection.peer.tell("forget_route", name=forgotten._name)
        connection.peer.tell("forget_route", name="never heard of")
        with pytest.raises(StackLostError, match="no open route of that name"):
            await forgotten.calls()
        assert held(session) == {}
        assert not gateway.routes


async def test_a_lost_connections_routes_are_closed(tmp_path: Path) -> None:
    """With the calls that are under way on them; those of others stay."""
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def waits(seen: Seen) -> web.Response:
        asked.set()
        try:
            return await asyncio.Event().wait()  # type: ignore[func-returns-value]
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with upstream(waits) as policy, joined(tmp_path) as (stack, connection, session):
        gateway = session.daemon.running.gateway
        others = gateway.open(policy.endpoint())
        route = await stack.open_route(policy.endpoint())
        async with aiohttp.ClientSession() as http:
            url = f"{route.base_url}/chat/completions"
            asking = asyncio.create_task(http.post(url, json={"messages": []}))
            await asked.wait()
            connection.peer.abort()
            assert (await asking).status == 404
            await cancelled.wait()
            assert list(gateway.routes.values()) == [others]
            assert (await http.post(url, json={"messages": []})).status == 404


async def test_a_closed_route_leaves_no_function(tmp_path: Path) -> None:
    """One that was made for the route alone; it answers until then."""
    async with joined(tmp_path) as (stack, connection, _):
        kept = stack.register("kept", lambda body: chat_answer("kept"))
        async with await stack.open_route(lambda body: chat_answer("mine")) as route:
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{route.base_url}/chat/completions", json={"messages": []}) as response,
            ):
                assert (await response.json())["choices"][0]["message"]["content"] == "mine"
            assert len(connection.callables) == 2
        async with await stack.open_route(kept):
            pass
        assert list(connection.callables) == ["kept"]
        opening = asyncio.create_task(stack.open_route(lambda body: {}))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert list(connection.callables) == ["kept"]
