"""Calls to judges and user simulators: whose failure they are, with a rollout's key and without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gymgate.core.errors import PolicyError
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from support.upstream import RawConnection, Seen, Upstream, chat_answer, upstream

FAILS = {"model": "m", "messages": [{"role": "user", "content": "fail"}]}
OTHER = {"model": "m", "messages": [{"role": "user", "content": "another question"}]}


class Judge:
    """Fails what `failing` says, holds back what `held` says, and answers everything else."""

    def __init__(self) -> None:
        self.failing: tuple[int, str] | None = None
        self.release = asyncio.Event()
        self.release.set()

    async def __call__(self, seen: Seen) -> web.StreamResponse:
        await self.release.wait()
        if self.failing is not None:
            status, message = self.failing
            return web.json_response({"error": {"message": message}}, status=status)
        return web.json_response(chat_answer())


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def script() -> Judge:
    return Judge()


@pytest.fixture
async def judge(script: Judge) -> AsyncIterator[Upstream]:
    async with upstream(script) as serving:
        yield serving


async def ask(
    http: aiohttp.ClientSession,
    gateway: Gateway,
    route: Route | None,
    body: Any = FAILS,
    name: str = "judge",
    **headers: str,
) -> int:
    """Ask a judge, with the rollout's key or without; the status."""
    prefix = f"/ng-rollout/{route.key}" if route is not None else ""
    url = f"http://127.0.0.1:{await gateway.port_for(name)}{prefix}/v1/chat/completions"
    async with http.post(url, json=body, headers=headers) as response:
        await response.read()
        return response.status


def message(route: Route) -> str:
    assert route.judges.failure is not None
    return route.judges.failure.message


async def test_a_judges_failure_stays_until_an_equal_call_is_answered(
    judge: Upstream, script: Judge, http: aiohttp.ClientSession
) -> None:
    async with Gateway() as gateway:
        route = gateway.open(judge.endpoint(), judges={"judge": judge.endpoint()})
        assert await ask(http, gateway, route) == 200
        assert route.judges.failure is None
        script.failing = (500, "out of memory")
        assert await ask(http, gateway, route, **{"Idempotency-Key": "a"}) == 502
        assert "model server 'judge'" in message(route)
        assert "out of memory" in message(route)
        assert isinstance(route.judges.failure, PolicyError)
        assert route.judges.failure.status_code == 500
        script.failing = None
        assert await ask(http, gateway, route, OTHER) == 200
        assert "out of memory" in message(route)
        assert await ask(http, gateway, route, **{"Idempotency-Key": "b"}) == 200
        assert route.judges.failure is None
        assert route.failure is None


@pytest.mark.parametrize("name", ["judge", "policy_model_as_judge"])
async def test_a_judges_context_overflow_is_its_failure_and_truncates_nothing(
    name: str, judge: Upstream, script: Judge, http: aiohttp.ClientSession
) -> None:
    script.failing = (400, "This model's maximum context length is 4096 tokens")
    async with Gateway() as gateway:
        route = gateway.open(judge.endpoint(), judges={"*": judge.endpoint()})
        assert await ask(http, gateway, route, name=name) == 400
        assert (route.truncated, route.failure) == (None, None)
        assert f"model server '{name}'" in message(route)
        assert await ask(http, gateway, route, name="policy_model") == 200
        assert route.truncated == "context_length"


async def test_a_judge_given_as_none_is_answered_by_nobody(
    judge: Upstream, http: aiohttp.ClientSession
) -> None:
    judges: dict[str, Any] = {"judge": "none", "*": judge.endpoint()}
    async with Gateway(judges=judges) as gateway:
        route = gateway.open(judge.endpoint())
        assert await ask(http, gateway, route, name="user") == 200
        assert route.judges.failure is None
        assert await ask(http, gateway, route) == 404
        assert await ask(http, gateway, None) == 404
        assert await ask(http, gateway, None, name="user") == 200
        assert message(route).startswith("model server 'judge' ")
        assert "--judge judge=URL" in message(route)
        assert [call.model_server for call in route.calls] == ["user"]


async def test_judges_under_one_default_do_not_share_what_they_said(http: aiohttp.ClientSession) -> None:
    """One judge's answer, quoted to another, arrives as it was quoted, without what only the first one knows."""

    async def thinks(seen: Seen) -> web.Response:
        answer = chat_answer("yes")
        answer["choices"][0]["message"]["vendor_note"] = "private thoughts"
        return web.json_response(answer)

    async with upstream(thinks) as judge, Gateway() as gateway:
        route = gateway.open(judge.endpoint(), judges={"*": judge.endpoint()})

        async def respond(name: str, items: list[Any]) -> list[Any]:
            url = f"http://127.0.0.1:{await gateway.port_for(name)}/ng-rollout/{route.key}/v1/responses"
            async with http.post(url, json={"model": "m", "input": items}) as response:
                assert response.status == 200
                return list((await response.json())["output"])

        question = {"role": "user", "content": "is it right?"}
        said = await respond("first", [question])
        again = [question, *said, {"role": "user", "content": "sure?"}]
        await respond("first", again)
        await respond("second", again)
        to_first, to_second = (json.dumps(seen.body) for seen in judge.seen[1:])
        assert "private thoughts" in to_first
        assert "private thoughts" not in to_second


async def given_up(gateway: Gateway, route: Route | None, judge: Upstream) -> None:
    """Ask, and close the connection once the judge has the question."""
    prefix = f"/ng-rollout/{route.key}" if route is not None else ""
    connection = await RawConnection.open(await gateway.port_for("judge"))
    count = len(judge.seen)
    await connection.post(f"{prefix}/v1/chat/completions", json.dumps(FAILS).encode())
    await judge.arrivals(count + 1)
    await connection.drop()


async def until_failed(route: Route) -> None:
    async with asyncio.timeout(10):
        while route.judges.failure is None:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_call_that_its_server_gave_up_is_a_failure(
    judge: Upstream, script: Judge, http: aiohttp.ClientSession
) -> None:
    """Until the server asks again and is there for the answer."""
    script.release.clear()
    async with Gateway() as gateway:
        route = gateway.open(judge.endpoint(), judges={"judge": judge.endpoint()})
        await given_up(gateway, route, judge)
        await until_failed(route)
        told = "'judge' had not answered when the server that asked it closed the connection"
        assert told in message(route)
        script.release.set()
        assert await ask(http, gateway, route, OTHER) == 200
        assert route.calls[0].status_code == 200  # which nobody was there to hear
        assert told in message(route)
        assert await ask(http, gateway, route) == 200
        assert route.judges.failure is None
        assert len(judge.seen) == 2


async def test_a_keyless_failure_is_that_of_every_rollout_running_with_the_judge(
    judge: Upstream, script: Judge, http: aiohttp.ClientSession
) -> None:
    async with Gateway(judges={"judge": judge.endpoint()}) as gateway:
        shared = gateway.keyless.judges
        before, one, two, elsewhere = (gateway.open(judge.endpoint()) for _ in range(4))
        with shared.shared_with(before.judges, {"judge"}):
            assert await ask(http, gateway, None) == 200
        script.failing = (500, "out of memory")
        with (
            shared.shared_with(one.judges, {"judge", "user"}),
            shared.shared_with(two.judges, {"judge"}),
            shared.shared_with(elsewhere.judges, {"user"}),
        ):
            assert await ask(http, gateway, None) == 502
            for route in (one, two):
                assert "model server 'judge'" in message(route)
                assert "one rollout" in message(route)
            assert await ask(http, gateway, None, name="user") == 404
            assert "model server 'user'" in message(elsewhere)
        with shared.shared_with(before.judges, {"judge"}):
            assert before.judges.failure is None
        assert "out of memory" in message(two)


async def test_a_keyless_call_that_is_tried_again_fails_nobody(
    judge: Upstream, script: Judge, http: aiohttp.ClientSession
) -> None:
    async with Gateway(judges={"judge": judge.endpoint()}) as gateway:
        route = gateway.open(judge.endpoint())
        with gateway.keyless.judges.shared_with(route.judges, {"judge"}):
            script.failing = (500, "busy")
            assert await ask(http, gateway, None) == 502
            script.failing = None
            assert await ask(http, gateway, None, OTHER) == 200
            assert "busy" in message(route)
            assert await ask(http, gateway, None) == 200
            assert route.judges.failure is None


async def test_a_keyless_answer_does_not_make_up_for_a_rollouts_own_lost_call(
    judge: Upstream, script: Judge, http: aiohttp.ClientSession
) -> None:
    """Another rollout may have asked the same."""
    script.release.clear()
    async with Gateway(judges={"judge": judge.endpoint()}) as gateway:
        route = gateway.open(judge.endpoint(), judges={"judge": judge.endpoint()})
        with gateway.keyless.judges.shared_with(route.judges, {"judge"}):
            await given_up(gateway, route, judge)
            await until_failed(route)
            [question] = route.judges._open.values()
            gateway.keyless.judges.note_answer(question)
            assert route.judges.failure is not None
            script.release.set()


async def test_a_keyless_answer_does_not_make_up_for_a_rollouts_own_failed_call(
    judge: Upstream, script: Judge, http: aiohttp.ClientSession
) -> None:
    async with Gateway(judges={"judge": judge.endpoint()}) as gateway:
        route = gateway.open(judge.endpoint(), judges={"judge": judge.endpoint()})
        with gateway.keyless.judges.shared_with(route.judges, {"judge"}):
            script.failing = (500, "busy")
            assert await ask(http, gateway, route) == 502
            script.failing = None
            assert await ask(http, gateway, None) == 200
            assert "busy" in message(route)
            assert await ask(http, gateway, route) == 200
            assert route.judges.failure is None


async def test_a_keyless_call_given_up_is_a_failure_of_those_who_ran_then(
    judge: Upstream, script: Judge, http: aiohttp.ClientSession
) -> None:
    script.release.clear()
    async with Gateway(judges={"judge": judge.endpoint()}) as gateway:
        shared = gateway.keyless.judges
        then, later = gateway.open(judge.endpoint()), gateway.open(judge.endpoint())
        with shared.shared_with(then.judges, {"judge"}):
            await given_up(gateway, None, judge)
            await until_failed(then)
            assert "one rollout" in message(then)
        with shared.shared_with(later.judges, {"judge"}):
            assert later.judges.failure is None
            script.release.set()
            assert await ask(http, gateway, None, OTHER) == 200
            assert later.judges.failure is None
