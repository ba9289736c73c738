"""NeMo Gym's client sends again after a dropped connection, unmarked; everything else that is equal is a new sample."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from aiohttp import web
from gateway_upstream import RawConnection, Seen, Upstream, chat_answer, upstream

from gymgate.gateway import CallableBackend, Gateway, Route

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


class Gate:
    """A script that numbers its answers and gives each when told to."""

    def __init__(self, size: int = 0, *, opened: bool = False) -> None:
        self.opened = asyncio.Event()
        self.count = 0
        self.padding = "x" * size
        if opened:
            self.opened.set()

    async def __call__(self, seen: Seen) -> web.Response:
        self.count += 1
        answer = chat_answer(f"{self.count}{self.padding}")
        await self.opened.wait()
        return web.json_response(answer)


class Scene:
    """One route, and connections to it."""

    def __init__(self, gateway: Gateway, policy: Upstream, route: Route, gate: Gate) -> None:
        self.gateway, self.policy, self.route, self.gate = gateway, policy, route, gate
        self.path = f"/ng-rollout/{route.key}/v1/chat/completions"
        self.connections: list[RawConnection] = []

    async def send(self, body: bytes = BODY, **headers: str) -> RawConnection:
        connection = await RawConnection.open(self.gateway.port)
        self.connections.append(connection)
        await connection.post(self.path, body, **headers)
        return connection

    async def ask(self, body: bytes = BODY, **headers: str) -> str:
        connection = await self.send(body, **headers)
        text = await said(connection)
        await connection.drop()
        return text


async def said(connection: RawConnection) -> str:
    status, body = await connection.answer()
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["message"]["content"])


async def finished(route: Route) -> None:
    await asyncio.wait([call.task for call in route.log if call.task is not None])


Play = Callable[[Scene], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def on_stage(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a scene on either event loop: they differ in when a write has left."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    async def stage(play: Play, gate: Callable[[], Gate]) -> None:
        script = gate()
        async with upstream(script) as policy, Gateway() as gateway:
            scene = Scene(gateway, policy, gateway.open(policy.endpoint()), script)
            await play(scene)
            for connection in scene.connections:
                connection.writer.close()

    def run(play: Play, gate: Callable[[], Gate] = Gate) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(stage(play, gate))

    return run


def test_a_resend_joins_the_call_in_flight(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        first = await scene.send()
        await scene.policy.arrivals(1)
        await first.drop()
        again = await scene.send()
        scene.gate.opened.set()
        assert await said(again) == "1"
        assert (len(scene.policy.seen), len(scene.route.calls)) == (1, 1)
        assert await scene.ask() == "2"  # that was it: equal requests are new samples again

    on_stage(play)


def test_a_resend_after_the_answer_came_gets_it(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        first = await scene.send()
        await scene.policy.arrivals(1)
        await first.drop()
        scene.gate.opened.set()
        await finished(scene.route)
        assert [await scene.ask(), await scene.ask()] == ["1", "2"]
        assert len(scene.route.calls) == 2

    on_stage(play)


def test_equal_requests_are_samples_in_parallel_and_in_turn(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        connections = [await scene.send() for _ in range(3)]
        await scene.policy.arrivals(3)
        scene.gate.opened.set()
        assert sorted([await said(connection) for connection in connections]) == ["1", "2", "3"]
        assert await scene.ask() == "4"
        await connections[0].post(scene.path, BODY)
        assert await said(connections[0]) == "5"

    on_stage(play)


def test_among_parallel_samples_the_dropped_one_is_joined(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        connections = []
        for number in range(1, 4):
            connections.append(await scene.send())
            await scene.policy.arrivals(number)
        await connections[1].drop()
        connections[1] = await scene.send()
        scene.gate.opened.set()
        assert [await said(connection) for connection in connections] == ["1", "2", "3"]
        assert len(scene.policy.seen) == 3

    on_stage(play)


def test_a_drop_while_the_answer_is_written(on_stage: Callable[..., None]) -> None:
    size = 24 << 20

    async def play(scene: Scene) -> None:
        first = await scene.send()
        await first.reader.readuntil(b"\r\n\r\n")  # and never the rest: more than sockets hold
        await first.drop()
        again = await scene.ask()
        assert (again[0], len(again)) == ("1", size + 1)
        assert len(scene.policy.seen) == 1
        assert (await scene.ask())[0] == "2"

    on_stage(play, lambda: Gate(size, opened=True))


def test_a_dropped_stream_is_joined_too(on_stage: Callable[..., None]) -> None:
    streaming = json.dumps({"model": "m", "messages": [], "stream": True}).encode()

    async def play(scene: Scene) -> None:
        first = await scene.send(streaming)
        await scene.policy.arrivals(1)
        await first.drop()
        again = await scene.send(streaming)
        scene.gate.opened.set()
        status, events = await again.answer()
        assert (status, len(scene.policy.seen)) == (200, 1)
        assert events.endswith(b"data: [DONE]\n\n")

    on_stage(play)


def test_only_the_same_request_joins(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        first = await scene.send()
        await scene.policy.arrivals(1)
        await first.drop()
        scene.gate.opened.set()
        assert await scene.ask(BODY.replace(b"hi", b"ho")) == "2"
        other = scene.gateway.open(scene.policy.endpoint())
        scene.path = f"/ng-rollout/{other.key}/v1/chat/completions"
        assert await scene.ask() == "3"
        scene.path = f"/ng-rollout/{scene.route.key}/v1/chat/completions"
        assert await scene.ask(Idempotency_Key="k") == "4"
        assert await scene.ask() == "1"

    on_stage(play)


def test_an_idempotency_key_names_the_call(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        first, second = [await scene.send(Idempotency_Key="a") for _ in range(2)]
        await scene.policy.arrivals(1)
        scene.gate.opened.set()
        assert [await said(first), await said(second), await scene.ask(Idempotency_Key="a")] == ["1"] * 3
        assert await scene.ask(Idempotency_Key="b") == "2"
        assert len(scene.route.calls) == 2

    on_stage(play)


def test_a_marked_retry_gets_an_answer_whose_connection_is_gone(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        scene.gate.opened.set()
        kept = await scene.send()
        assert await said(kept) == "1"
        assert await scene.ask(x_stainless_retry_count="1") == "2"  # nobody lost "1"
        await kept.drop()
        assert await scene.ask(x_stainless_retry_count="0") == "3"
        answers = [await scene.ask(x_stainless_retry_count="1") for _ in range(3)]
        assert answers == ["1", "2", "3"]
        assert len(scene.route.calls) == 3

    on_stage(play)


def test_close_cancels_upstream_answers_the_agent_and_records_no_more(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        waiting = await scene.send()
        await scene.policy.arrivals(1)
        await scene.route.close()
        while not scene.policy.cancelled:
            scene.policy.arrived.clear()
            await scene.policy.arrived.wait()
        status, body = await waiting.answer()
        assert status == 404
        assert b"released" in body
        [call] = scene.route.calls
        assert (call.status_code, call.error) == (None, "cancelled: the rollout was released")
        late = await scene.send()
        assert (await late.answer())[0] == 404
        assert (len(scene.route.calls), len(scene.policy.seen)) == (1, 1)
        await scene.route.close()

    on_stage(play)


def test_a_drop_in_the_middle_of_the_request_starts_nothing(
    on_stage: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def play(scene: Scene) -> None:
        connection = await RawConnection.open(scene.gateway.port)
        head = f"POST {scene.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
        connection.writer.write(head.encode() + BODY[:10])
        await connection.writer.drain()
        await scene.send()  # by the time this one is upstream, the other was read as far as it goes
        await scene.policy.arrivals(1)
        await connection.drop()
        scene.gate.opened.set()
        assert await said(scene.connections[0]) == "1"
        assert await scene.ask() == "2"
        assert len(scene.route.calls) == 2

    on_stage(play)
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_leaving_the_gateway_answers_what_is_in_flight(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        waiting = await scene.send()
        await scene.policy.arrivals(1)
        await scene.gateway.__aexit__()
        assert (await waiting.answer())[0] == 404
        with pytest.raises(ConnectionRefusedError):
            await scene.send()

    on_stage(play)


def test_a_backend_that_ignores_cancellation_records_nothing_late() -> None:
    async def stubborn(body: dict[str, Any]) -> dict[str, Any]:
        arrived.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return chat_answer()

    arrived = asyncio.Event()

    async def main() -> None:
        async with Gateway() as gateway:
            route = gateway.open(CallableBackend(stubborn))
            connection = await RawConnection.open(gateway.port)
            await connection.post(f"/ng-rollout/{route.key}/v1/chat/completions", BODY)
            await arrived.wait()
            await route.close()
            assert (await connection.answer())[0] == 404
            [call] = route.calls
            assert (call.status_code, call.response) == (None, None)
            connection.writer.close()

    asyncio.run(main())
