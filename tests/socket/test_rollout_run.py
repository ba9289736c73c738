"""One row to one agent: what its answer, the endpoint's failures and the limits make of the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gymgate.core import codec
from gymgate.core.config import Dialect, RolloutLimits
from gymgate.core.errors import ServerDiedError
from gymgate.core.retrying import Note, unnoted
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.stack.daemon import rollout
from gymgate.stack.daemon.rollout import RolloutRun, new_client
from gymgate.stack.daemon.running_environment import ServerSet
from support.upstream import Seen, chat_answer, drop, responses_answer, upstream

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OVERFLOW = {"error": {"message": "This model's maximum context length is 32768 tokens"}}
PLAN = SimpleNamespace(packaged_graders={})
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

    async def run(self, owner: str | None = None) -> dict[str, Any]:
        environment: Any = SimpleNamespace(name="e", agents={"solver": "simple_agent"}, plan=PLAN)
        running = RolloutRun(environment, "solver", b"{}", self.route, 20.0, self.started, owner)
        async with new_client() as client:
            await running.post(client, f"{self.url}/run")
        return running.record_fields()

    async def run_whole(
        self,
        environment: Any,
        timeout_s: float = 20.0,
        owner: str | None = None,
        files: int = 1,
        places: int = 1,
    ) -> dict[str, Any]:
        """The record of a rollout from its start on a stack that has room for so many."""
        async with new_client() as client:
            stack: Any = SimpleNamespace(
                gateway=self.gateway,
                client=client,
                file_limit=asyncio.Semaphore(files),
                unheard=asyncio.Semaphore(places),
            )
            running = RolloutRun(environment, "solver", b"{}", self.route, timeout_s, self.started, owner)
            await running.run(stack)
        return codec.loads_object(running.packed().body)


class Servers:
    """An environment whose servers are up, and whose agent is that of a scene."""

    name = "e"
    agents: dict[str, str] = {"solver": "simple_agent"}  # noqa: RUF012
    plan = PLAN
    agent_processes: frozenset[str] = frozenset()
    judges: frozenset[str] = frozenset()

    def __init__(self, played: Scene) -> None:
        self.port = int(played.url.rpartition(":")[2])
        self.servers = ServerSet(1)
        self.cleaned = 0
        """How often containers were removed."""

    async def server_set(self) -> ServerSet:
        return self.servers

    @contextmanager
    def server_port(self, server: str) -> Iterator[int]:
        yield self.port

    def remove_containers(self, *args: Any, **settings: Any) -> None:
        self.cleaned += 1

    def never_asked_error(self, *args: Any) -> None:
        """Its agents may score a row without a model call."""


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


async def test_an_answer_of_too_many_values_fails_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a hundred times its length in the daemon's memory, and the daemon serves others."""
    monkeypatch.setattr(codec, "MAX_VALUES", 100)
    async with scene(scores(more=[[]] * 100)) as played:
        assert (await played.run())["status"] == "completed"
    async with scene(scores(more=[[]] * 300)) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("failed", "environment")
    assert "values" in outcome["error"]["message"]


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
        environment: Any = SimpleNamespace(name="e", agents={"solver": "simple_agent"}, plan=PLAN)
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


async def test_a_judge_that_is_waited_for_no_longer_fails_the_rollout_though_its_score_is_heard_first() -> (
    None
):
    asked = asyncio.Event()

    async def held(seen: Seen) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        return web.Response()

    async def agent(scene: Scene) -> web.Response:
        asking = asyncio.create_task(scene.ask("judge"))
        await asked.wait()
        asyncio.get_running_loop().call_later(0.1, asking.cancel)  # its connection closes after the answer
        return web.json_response({**SCORED, "reward": 0.0})

    async with scene(agent, judge=held) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("failed", "policy")
    assert "closed" in outcome["error"]["message"]


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
        self,
        body: dict[str, Any],
        *,
        raw: bytes | None = None,
        session: str | None = None,
        note: Note = unnoted,
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


async def hangs(scene: Scene) -> web.Response:
    return await asyncio.Event().wait()  # type: ignore[func-returns-value]


class Starting(Servers):
    """One whose servers never listen."""

    async def server_set(self) -> ServerSet:
        return await asyncio.Event().wait()  # type: ignore[func-returns-value]


@pytest.mark.parametrize("lacking", ["ulimit", "servers", "posted", "solver"])
async def test_a_rollout_whose_time_runs_out_says_what_it_waited_for(lacking: str) -> None:
    """Room for its files, its servers, its turn to be posted, or its agent."""
    async with scene(hangs) as played:
        environment = (Starting if lacking == "servers" else Servers)(played)
        room = {"files": int(lacking != "ulimit"), "places": int(lacking != "posted")}
        error = (await played.run_whole(environment, timeout_s=0.2, **room))["error"]
    assert error["type"] == "RolloutTimeoutError"
    assert lacking in error["message"]
    assert ("posted" in error["message"]) == (lacking == "posted")


async def test_a_timeout_that_is_not_the_rollouts_is_a_mistake_of_the_daemons() -> None:
    class Broken(Servers):
        async def server_set(self) -> ServerSet:
            raise TimeoutError("a mistake")

    async with scene(hangs) as played:
        outcome = await played.run_whole(Broken(played))
    assert kind_of(outcome) == ("failed", "infrastructure")
    assert outcome["error"]["type"] == "StackLostError"


@pytest.mark.parametrize("calls", ["none", "without its key", "with and without its key"])
async def test_a_dropped_key_is_the_reason_where_no_policy_call_had_it(calls: str) -> None:
    """Not of another rollout's calls: one without a key was refused before."""

    async def without_key(scene: Scene) -> None:
        body = {"model": "m", "messages": []}
        async with scene.http.post(f"{scene.gateway.url}/v1/chat/completions", json=body) as response:
            assert response.status >= 400

    async def agent(scene: Scene) -> web.Response:
        if "without" in calls:
            await without_key(scene)
        if "with " in calls:
            await scene.ask()
        return web.json_response({"detail": "no answer"}, status=500)

    async with scene(agent) as played:
        await without_key(played)
        assert played.gateway.keyless_policy_calls == 1
        error = (await played.run_whole(Servers(played)))["error"]
    assert ("without a key" in error["message"]) == (calls == "without its key")
    assert "no answer" in error["message"]


@pytest.mark.parametrize("is_released", [False, True])
async def test_a_server_that_dies_is_the_reason_unless_the_rollout_is_released(is_released: bool) -> None:
    began = asyncio.Event()

    async def agent(scene: Scene) -> web.Response:
        began.set()
        return await hangs(scene)

    async with scene(agent) as played:
        environment = Servers(played)
        running = asyncio.create_task(played.run_whole(environment))
        await began.wait()
        assert [*environment.servers.rollouts] == [running]
        environment.servers.error = ServerDiedError("it died", server="solver")
        running.cancel()
        if is_released:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            assert (await running)["error"]["type"] == "ServerDiedError"
    assert not environment.servers.rollouts


def reports(stage: str, *asked: str) -> Agent:
    """An environment server that makes calls, and reports that its episode failed."""

    async def agent(scene: Scene) -> web.Response:
        for model_server in asked:
            await scene.ask(model_server)
        failure = {
            "failure_reason": "why",
            "stage": stage,
            "partial_response": {"output": [{"said": "this"}]},
        }
        return web.json_response({"episode_id": {"rollout_id": "public"}, "failure": failure, "result": None})

    return agent


@pytest.mark.parametrize(
    ("agent", "owner", "cleaned"),
    [(scores(), None, 0), (stumbles(), None, 1), (reports("verification"), "server", 1)],
)
async def test_containers_are_removed_of_rollouts_that_failed(
    agent: Agent, owner: str | None, cleaned: int
) -> None:
    """Also of one that has a result: its agent's answer."""
    async with scene(agent) as played:
        environment = Servers(played)
        outcome = await played.run_whole(environment, owner=owner)
    assert environment.cleaned == cleaned
    assert (outcome["status"] == "failed") == bool(cleaned)


@pytest.mark.parametrize(
    ("stage", "kind"), [("agent", ("truncated", None)), ("verification", ("failed", "environment"))]
)
async def test_a_limit_explains_the_end_of_an_agent_and_no_other_failure(
    stage: str, kind: tuple[str, str | None]
) -> None:
    asked = ["policy_model"] * 2
    async with scene(reports(stage, *asked), limits=RolloutLimits(max_calls=1)) as played:
        assert kind_of(await played.run(owner="server")) == kind


async def test_what_an_agent_said_before_its_policy_failed_is_kept() -> None:
    async with scene(reports("agent", "policy_model"), policy=breaks) as played:
        outcome = await played.run(owner="server")
    assert kind_of(outcome) == ("failed", "policy")
    assert outcome["result"]["response"] == {"output": [{"said": "this"}]}


async def test_a_breakdown_has_no_parts_of_a_reward() -> None:
    async with scene(scores(_ng_failure_class="agent_error", reward_style=0.5)) as played:
        outcome = await played.run()
    assert kind_of(outcome) == ("failed", "environment")
    assert "reward_parts" not in outcome


async def test_a_timeout_after_the_policy_had_answered_says_that_it_was_elsewhere() -> None:
    """Of an agent whose tools hang; while the policy is asked, the agent is waited for."""
    for hung, in_words in ((True, "answered its 1 call"), (False, "waiting for")):
        release = asyncio.Event()

        async def agent(scene: Scene, hung: bool = hung, release: asyncio.Event = release) -> web.Response:
            if hung:
                await scene.ask("policy_model")
            await release.wait()
            return web.json_response(SCORED)

        async with scene(agent) as played:
            error = (await played.run_whole(Servers(played), timeout_s=2.0))["error"]
            release.set()
        assert error["type"] == "RolloutTimeoutError"
        assert in_words in error["message"]
