"""NeMo Gym's client sends again after a dropped connection, unmarked; everything else that is equal is a new sample."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from aiohttp import web

from gymgate.gateway.backends.callable import CallableBackend
from gymgate.gateway.call import Call
from gymgate.gateway.repeats import (
    KEPT_BYTES,
    MARKED_ANSWERS,
    RECENT_ANSWERS,
    RequestKey,
    RetryDeduplicator,
    is_marked_retry,
)
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.rollouts.record import ModelCall
from support.upstream import RawConnection, Seen, Upstream, chat_answer, upstream

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


@pytest.mark.parametrize(
    ("count", "marked"), [("1", True), ("00", False), ("x", False), ("\u00b2", False), ("9" * 5000, True)]
)
def test_a_count_that_is_no_number_marks_no_retry(count: str, marked: bool) -> None:
    """The last two are digits that Python makes no number of."""
    assert is_marked_retry({"x-stainless-retry-count": count}) is marked
    assert is_marked_retry({}) is False


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
        (call,) = scene.route.calls
        assert call.response is not None
        assert call.details["undelivered"] == call.response["id"]
        assert [await scene.ask(), await scene.ask()] == ["1", "2"]
        assert len(scene.route.calls) == 2
        assert not any("undelivered" in call.details for call in scene.route.calls)

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


def test_a_failed_call_is_made_anew_for_its_idempotency_key() -> None:
    """A retry wants another try, not the failure again; what is under way is joined all the same."""

    async def fails_once(seen: Seen) -> web.Response:
        count.append(1)
        return web.json_response(chat_answer(str(len(count))), status=500 if len(count) == 1 else 200)

    count: list[int] = []

    async def main() -> None:
        async with upstream(fails_once) as policy, Gateway() as gateway:
            route = gateway.open(policy.endpoint())
            connection = await RawConnection.open(gateway.port)
            for expected in (502, 200, 200):
                await connection.post(
                    f"/ng-rollout/{route.key}/v1/chat/completions", BODY, Idempotency_Key="a"
                )
                assert (await connection.answer())[0] == expected
            assert [call.status_code for call in route.calls] == [502, 200]
            connection.writer.close()

    asyncio.run(main())


def test_a_failure_is_given_to_no_retry_and_takes_no_answers_room() -> None:
    async def script(seen: Seen) -> web.Response:
        return web.json_response(chat_answer(), status=400 if b"bad" in seen.raw else 200)

    async def main() -> None:
        async with upstream(script) as policy, Gateway() as gateway:
            route = gateway.open(policy.endpoint())
            path = f"/ng-rollout/{route.key}/v1/chat/completions"

            async def ask(body: bytes, **headers: str) -> int:
                connection = await RawConnection.open(gateway.port)
                await connection.post(path, body, **headers)
                status, _ = await connection.answer()
                await connection.drop()
                return status

            assert await ask(BODY) == 200
            for number in range(RECENT_ANSWERS + 1):
                assert await ask(BODY.replace(b"hi", b"bad%d" % number)) == 400
            assert await ask(BODY, x_stainless_retry_count="1") == 200
            assert await ask(BODY.replace(b"hi", b"bad0"), x_stainless_retry_count="1") == 400
            assert len(route.calls) == RECENT_ANSWERS + 3

    asyncio.run(main())


def test_a_retry_is_given_the_answer_to_its_own_question(on_stage: Callable[..., None]) -> None:
    async def play(scene: Scene) -> None:
        scene.gate.opened.set()
        other = BODY.replace(b"hi", b"ho")
        assert [await scene.ask(other), await scene.ask()] == ["1", "2"]
        assert await scene.ask(x_stainless_retry_count="1") == "2"
        assert await scene.ask(x_stainless_retry_count="1") == "2"
        assert await scene.ask(other, x_stainless_retry_count="1") == "1"

    on_stage(play)


def test_a_second_lost_connection_is_joined_too(on_stage: Callable[..., None]) -> None:
    """The call is the last connection's that asked for it, and lost with that."""

    async def play(scene: Scene) -> None:
        first = await scene.send()
        await scene.policy.arrivals(1)
        await first.drop()
        second = await scene.send()
        await belongs_to(scene.route, second)
        third = await scene.send()
        await scene.policy.arrivals(2)  # the second one is there: an equal request is a sample of its own
        scene.gate.opened.set()
        assert [await said(second), await said(third)] == ["1", "2"]

    on_stage(play)


async def belongs_to(route: Route, connection: RawConnection) -> None:
    """Wait until the route's only call is that connection's."""
    own = connection.writer.get_extra_info("sockname")
    async with asyncio.timeout(10):
        while True:
            [call] = route.log
            transport = call.connection.transport if call.connection is not None else None
            if transport is not None and transport.get_extra_info("peername") == own:
                return
            await asyncio.sleep(0.005)


def test_an_answer_written_to_a_reset_connection_is_not_delivered(on_stage: Callable[..., None]) -> None:
    """The reset arrives when the answer is there and nothing was read since: only the write itself shows it."""

    async def play(scene: Scene) -> None:
        async def resets(body: dict[str, Any]) -> dict[str, Any]:
            answers.append(1)
            if len(answers) == 1:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            return chat_answer(str(len(answers)))

        answers: list[int] = []
        route = scene.gateway.open(CallableBackend(resets))
        scene.path = f"/ng-rollout/{route.key}/v1/chat/completions"
        client = socket.create_connection(("127.0.0.1", scene.gateway.port))
        head = f"POST {scene.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
        client.sendall(head.encode() + BODY)
        while not answers:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert [await scene.ask(), await scene.ask()] == ["1", "2"]

    on_stage(play)


def test_an_answer_of_which_the_kernel_took_a_part_is_not_delivered(on_stage: Callable[..., None]) -> None:
    """The rest, small enough for any buffer, still lies in this process when the connection breaks."""

    async def play(scene: Scene) -> None:
        async def answers(body: dict[str, Any]) -> dict[str, Any]:
            count.append(1)
            if len(count) == 1:
                connection = route.log[0].connection
                assert connection is not None
                assert connection.transport is not None
                sock = connection.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            return chat_answer(str(len(count)) + "x" * 60_000)

        count: list[int] = []
        route = scene.gateway.open(CallableBackend(answers))
        scene.path = f"/ng-rollout/{route.key}/v1/chat/completions"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", scene.gateway.port))
            head = f"POST {scene.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
            client.sendall(head.encode() + BODY)
            client.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(client, 16) == b"HTTP/1.1 200 OK\r"
        assert [(await scene.ask())[0], (await scene.ask())[0]] == ["1", "2"]

    on_stage(play)


async def test_a_keyless_call_that_nobody_came_back_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no end of a rollout at which it would be."""
    monkeypatch.setattr("gymgate.gateway.route._KEYLESS_RESEND_S", 0.01)
    gate = Gate()
    async with upstream(gate) as judge, Gateway(judges={"judge": judge.endpoint()}) as gateway:
        port = await gateway.port_for("judge")
        connection = await RawConnection.open(port)
        await connection.post("/v1/chat/completions", BODY)
        await judge.arrivals(1)
        await connection.drop()
        assert list(gateway.keyless.repeated._unwritten) != []
        gate.opened.set()
        async with asyncio.timeout(10):
            while gateway.keyless.repeated._unwritten:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        connection = await RawConnection.open(port)
        await connection.post("/v1/chat/completions", BODY)
        assert await said(connection) == "2"
        connection.writer.close()


@pytest.mark.parametrize(("marked", "bound"), [(True, MARKED_ANSWERS), (False, RECENT_ANSWERS)])
def test_what_may_be_asked_for_again_is_bounded(marked: bool, bound: int) -> None:
    """In number and in bytes; the newest answer stays, and what is let go gives its memory back."""

    def answered(number: int, payload: bytes) -> Call:
        key = RequestKey("m", "chat", b"%d" % number, f"k{number}" if marked else None)
        record = ModelCall(index=number, model_server="m", dialect="chat", status_code=200)
        call = Call(record, done=True, payload=payload)
        resends.add(key, call)
        resends.note_delivery(key, call)
        return call

    def held(calls: list[Call]) -> list[int]:
        return [call.record.index for call in calls if call.payload]

    resends = RetryDeduplicator()
    calls = [answered(number, b"short") for number in range(bound + 5)]
    assert held(calls) == list(range(5, bound + 5))
    assert (len(resends._marked) + len(resends._recent), resends._unwritten) == (bound, {})
    first = RequestKey("m", "chat", b"0", "k0" if marked else None)
    last = RequestKey("m", "chat", b"%d" % (bound + 4), f"k{bound + 4}" if marked else None)
    assert resends.find(first, retry=True) is None
    assert resends.find(last, retry=True) is calls[-1]
    resends.note_delivery(last, calls[-1])  # the retry got it
    long = [answered(number, bytes(KEPT_BYTES // 2)) for number in range(1000, 1003)]
    assert held(calls + long) == [1002]
    longer = answered(2000, bytes(2 * KEPT_BYTES))
    assert held([*long, longer]) == [2000]


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
        assert call.status_code is None
        assert str(call.error).startswith("cancelled: ")
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
