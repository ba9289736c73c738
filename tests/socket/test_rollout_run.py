"""One row to one agent: what its answer, the endpoint's failures and the limits make of the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gymgate.core.config import Dialect, RolloutLimits
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.stack import rollout
from gymgate.stack.rollout import RolloutRun, new_client
from support.upstream import Seen, chat_answer, drop, responses_answer, upstream

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OVERFLOW = {"error": {"message": "This model's maximum context length is 32768 tokens"}}
SCORED = {"reward": 0.5, "response": responses_answer()}

Agent = Callable[["Scene"], Awaitable[web.StreamResponse]]


class Scene:
    """A rollout's route, and an agent server that does what the test says."""

    def __init__(self, gateway: Gateway, route: Route, http: aiohttp.ClientSession, started: float) -> None:
        self.gateway, self.route, self.http, self.started = gateway, route, http, started
        self.endpoint: Any = None
        """The policy's."""
        self.url = ""
        self.request: Seen | None = None
        """What the agent was sent."""

    async def ask(self, model_server: str = "policy_model") -> int:
        """The status of a model call of the agent's."""
        port = await self.gateway.port_for(model_server)
        url = f"http://127.0.0.1:{port}/ng-rollout/{self.route.key}/v1/chat/completions"
        async with self.http.post(url, json=BODY) as response:
            return response.status

    async def run(self) -> dict[str, Any]:
        environment: Any = SimpleNamespace(name="e", agents={"solver": "simple_agent"})
        running = RolloutRun(environment, "solver", b"{}", self.route, timeout_s=20.0, started=self.started)
        async with new_client() as client:
            await running.post(client, f"{self.url}/run")
        return running.record_fields()


async def policy_says(seen: Seen) -> web.Response:
    return web.json_response(chat_answer())


async def policy_overflows(seen: Seen) -> web.Response:
    return web.json_response(OVERFLOW, status=400)


async def breaks(seen: Seen) -> web.Response:
    return web.json_response({"error": {"message": "out of order"}}, status=500)


@asynccontextmanager
async def scene(
    agent: Agent, policy: Any = policy_says, judge: Any = policy_says, **route: Any
) -> AsyncIterator[Scene]:
    """A real gateway, endpoints and agent server."""
    async with (
        upstream(policy) as policy_server,
        upstream(judge) as judge_server,
        Gateway() as gateway,
        aiohttp.ClientSession() as http,
    ):
        started = time.monotonic()
        opened = gateway.open(
            policy_server.endpoint(), judges={"judge": judge_server.endpoint()}, rollout_id="public", **route
        )
        played = Scene(gateway, opened, http, started)
        played.endpoint = policy_server.endpoint()

        async def run(seen: Seen) -> web.StreamResponse:
            played.request = seen
            return await agent(played)

        async with upstream(run) as server:
            played.url = server.url.removesuffix("/v1")
            yield played
        await opened.close()


def scores(*asked: str, **result: Any) -> Agent:
    """An agent that makes calls, whatever comes of them, and is scored."""

    async def agent(scene: Scene) -> web.Response:
        for model_server in asked:
            await scene.ask(model_server)
        return web.json_response({**SCORED, **result})

    return agent


def stumbles(*asked: str) -> Agent:
    """An agent that makes calls and answers with an error, which quotes where it sends them."""

    async def agent(scene: Scene) -> web.Response:
        for model_server in asked:
            await scene.ask(model_server)
        return web.json_response({"detail": f"no answer from {scene.route.base_url}"}, status=500)

    return agent


def kind_of(outcome: dict[str, Any]) -> tuple[str, str | None]:
    """The status, and of a failed rollout whose fault it is."""
    return outcome["status"], outcome["error"]["kind"] if "error" in outcome else None


async def test_an_answer_is_scored() -> None:
    async with scene(scores("policy_model", "judge")) as played:
        outcome = await played.run()
    assert (kind_of(outcome), outcome["reward"]) == (("completed", None), 0.5)


@pytest.mark.parametrize("heard_by", ["its first call", "its end", "time"])
async def test_a_row_makes_room_for_the_next_once_its_server_is_heard_of(
    heard_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place: it is free again after the first call, else after a time, else when the rollout has ended."""
    monkeypatch.setattr(rollout, "UNHEARD_S", 0.1 if heard_by == "time" else 60.0)
    places = asyncio.Semaphore(1)

    async def agent(scene: Scene) -> web.Response:
        assert places.locked() or heard_by == "time"
        if heard_by == "its first call":
            await asyncio.gather(scene.ask(), scene.ask())
        if heard_by != "its end":
            async with asyncio.timeout(10):
                await places.acquire()
            places.release()
        return web.json_response(SCORED)

    async with scene(agent) as played, new_client() as client:
        environment: Any = SimpleNamespace(name="e", agents={"solver": "simple_agent"})
        running = RolloutRun(environment, "solver", b"{}", played.route, timeout_s=20.0)
        stack: Any = SimpleNamespace(client=client, unheard=places)
        await running.post_in_turn(stack, f"{played.url}/run")
    assert running.fields["reward"] == 0.5
    await places.acquire()
    assert places.locked(), "a place was given back twice"


OWN = "policy_model_reasoning_off"


@pytest.mark.parametrize("judges", [{}, {"*": "none"}, {OWN: "policy"}, {OWN: "given"}])
async def test_the_model_server_that_an_agent_has_for_its_policy_is_its_policy(
    judges: dict[str, Any],
) -> None:
    """Its calls are bounded and recorded as the policy's, and go to the policy unless it has an endpoint."""
    async with upstream(policy_says) as given:
        async with scene(
            scores(*[OWN] * 5), limits=RolloutLimits(max_calls=2), policy_servers=(OWN,)
        ) as played:
            found = {name: given.endpoint() if judge == "given" else judge for name, judge in judges.items()}
            route = played.gateway.open(
                played.endpoint, judges=found, limits=RolloutLimits(max_calls=2), policy_servers=(OWN,)
            )
            played.route = route
            outcome = await played.run()
            await route.close()
        assert (kind_of(outcome), outcome["limit"]) == (("truncated", None), "max_calls")
        assert [call.model_server for call in route.calls] == ["policy_model"] * 2
        assert outcome["timing"]["judge_s"] == 0
        assert len(given.seen) == (2 if OWN in judges and judges[OWN] == "given" else 0)


async def test_the_usual_policy_is_one_beside_an_agents_own() -> None:
    """Its calls count towards the limit, too."""
    limits = RolloutLimits(max_calls=2)
    async with scene(
        scores("policy_model", OWN, "policy_model"), limits=limits, policy_servers=(OWN,)
    ) as played:
        outcome = await played.run()
    assert (kind_of(outcome), outcome["limit"]) == (("truncated", None), "max_calls")
    assert len(played.route.log) == 2


async def test_a_failure_of_an_agents_own_model_server_is_the_policys() -> None:
    async with scene(stumbles(OWN), policy=breaks, policy_servers=(OWN,)) as played:
        outcome = await played.run()
        assert played.route.judges.failure is None
    assert kind_of(outcome) == ("failed", "policy")
    assert OWN not in outcome["error"]["message"]


@pytest.mark.parametrize("overflow", ["answer", "refuse"])
@pytest.mark.parametrize("agent", [scores("policy_model"), stumbles("policy_model")])
async def test_a_full_context_ends_a_rollout_as_truncated(agent: Agent, overflow: Any) -> None:
    """Whether the agent is scored for what it had, or cannot go on without the call that was refused."""
    limits = RolloutLimits(context_overflow=overflow)
    async with scene(agent, policy=policy_overflows, limits=limits) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("truncated", None)
    assert outcome["limit"] == "context_length"
    assert outcome.get("reward") in (0.5, None)


@pytest.mark.parametrize("agent", [scores(*["policy_model"] * 2), stumbles(*["policy_model"] * 2)])
async def test_a_limit_of_calls_ends_a_rollout_as_truncated(agent: Agent) -> None:
    async with scene(agent, limits=RolloutLimits(max_calls=1)) as played:
        assert kind_of(await played.run()) == ("truncated", None)


@pytest.mark.parametrize("agent", [scores("policy_model"), stumbles("policy_model")])
async def test_the_policys_failure_is_the_rollouts(agent: Agent) -> None:
    """Also where the agent is scored for a conversation that the endpoint broke off."""
    async with scene(agent, policy=breaks) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("failed", "policy")
    assert "out of order" in outcome["error"]["message"]
    assert outcome["error"]["status_code"] == 500


@pytest.mark.parametrize("model_server", ["policy_model", "judge"])
async def test_a_call_that_cannot_be_translated_is_the_environments_failure(model_server: str) -> None:
    async def agent(scene: Scene) -> web.Response:
        port = await scene.gateway.port_for(model_server)
        url = f"http://127.0.0.1:{port}/ng-rollout/{scene.route.key}/v1/responses"
        async with scene.http.post(url, json={"input": [7]}) as response:
            assert response.status == 400
        return web.json_response({"detail": "no answer"}, status=500)

    async with scene(agent) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("failed", "environment")
    assert outcome["error"]["type"] == "EnvironmentServerError"
    assert not outcome["error"]["retryable"]


class Broken:
    """A backend with a mistake."""

    dialect: Dialect = "chat"

    async def call(
        self, body: dict[str, Any], *, raw: bytes | None = None, session: str | None = None
    ) -> BackendAnswer:
        raise ZeroDivisionError("a mistake")


async def test_a_failure_inside_the_gateway_is_not_the_policys() -> None:
    async with scene(stumbles("policy_model")) as played:
        played.route = played.gateway.open(Broken())
        outcome = await played.run()
        await played.route.close()
    assert kind_of(outcome) == ("failed", "infrastructure")
    assert outcome["error"]["type"] == "GymgateError"
    assert outcome["error"]["retryable"]


async def test_the_first_failure_is_the_one_to_blame() -> None:
    async def worse_and_worse(seen: Seen) -> web.Response:
        count.append(1)
        return web.json_response({"error": {"message": f"failure {len(count)}"}}, status=500)

    count: list[int] = []
    async with scene(stumbles(*["policy_model"] * 2), policy=worse_and_worse) as played:
        outcome = await played.run()
    assert "failure 1" in outcome["error"]["message"]


async def test_a_policy_that_answers_in_the_end_is_scored() -> None:
    """The agent asked again after a failure."""
    answers = iter([breaks, policy_says])

    async def policy(seen: Seen) -> web.Response:
        return await next(answers)(seen)

    async with scene(scores(*["policy_model"] * 2), policy=policy) as played:
        outcome = await played.run()
    assert (kind_of(outcome), outcome["reward"]) == (("completed", None), 0.5)


@pytest.mark.parametrize("field", ["failure_kind", "_ng_failure_class"])
async def test_a_zero_in_the_place_of_a_failed_judge_is_no_reward(field: str) -> None:
    agent = scores("policy_model", "judge", reward=0.0, mask_sample=True, **{field: "judge_failed"})
    async with scene(agent, judge=breaks) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("failed", "policy")
    assert "model server 'judge'" in outcome["error"]["message"]


async def test_an_error_of_the_agents_own_does_not_show_the_rollouts_key() -> None:
    async with scene(stumbles("policy_model")) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("failed", "environment")
    assert "no answer from http" in outcome["error"]["message"]
    assert "/ng-rollout/public/v1" in outcome["error"]["message"]
    assert played.route.key not in str(outcome)


async def test_an_answer_that_is_no_object_is_a_failure() -> None:
    async def agent(scene: Scene) -> web.Response:
        return web.json_response([scene.route.key])

    async with scene(agent) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("failed", "infrastructure")
    assert "JSON" in outcome["error"]["message"]


async def test_an_agent_that_is_not_there_or_hangs_up_is_a_failure() -> None:
    async with scene(drop_agent) as played:
        outcomes = [await played.run()]
        with socket.socket() as nobody:  # bound, and not listening
            nobody.bind(("127.0.0.1", 0))
            played.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            outcomes.append(await played.run())
    for outcome in outcomes:
        assert kind_of(outcome) == ("failed", "infrastructure")
        assert "'solver'" in outcome["error"]["message"]


async def drop_agent(scene: Scene) -> web.StreamResponse:
    """An agent server that breaks the connection without a word."""
    assert scene.request is not None
    return await drop(scene.request)


async def test_what_a_rollout_took_is_told_by_whom_it_asked() -> None:
    async with scene(scores("policy_model", "judge", "policy_model")) as played:
        timing = (await played.run())["timing"]
        calls = [call.record for call in played.route.log]
    assert [call.model_server for call in calls] == ["policy_model", "judge", "policy_model"]
    assert timing["model_s"] == pytest.approx(calls[0].duration_s + calls[2].duration_s)
    assert timing["judge_s"] == pytest.approx(calls[1].duration_s)
    assert timing["judge_s"] > 0
    assert all(0 <= call.started_s + call.duration_s <= timing["total_s"] for call in calls)


async def test_cancelling_a_rollout_hangs_up_on_its_agent() -> None:
    gone = asyncio.Event()
    began = asyncio.Event()

    async def waits(scene: Scene) -> web.Response:
        began.set()
        try:
            return await asyncio.Event().wait()  # type: ignore[func-returns-value]
        finally:
            gone.set()

    async with scene(waits) as played:
        running = asyncio.create_task(played.run())
        await began.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await asyncio.wait_for(gone.wait(), 10)


async def test_a_redirect_of_an_agent_is_not_followed() -> None:
    async def agent(scene: Scene) -> web.Response:
        raise AssertionError("not reached")

    async with scene(agent) as played, upstream(_redirects) as elsewhere:
        played.url = elsewhere.url.removesuffix("/v1")
        outcome = await played.run()
        assert kind_of(outcome) == ("failed", "environment")
        assert outcome["error"]["status_code"] == 307
        assert len(elsewhere.seen) == 1


async def _redirects(seen: Seen) -> web.Response:
    return web.Response(status=307, headers={"Location": "/elsewhere"})
