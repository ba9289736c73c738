"""A stack's connection to a daemon without NeMo Gym: its agent is an HTTP server of the test's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr

from gymgate.core.config import HTTPEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.rollouts import Rollout
from gymgate.stack.client.endpoints import KEPT
from gymgate.stack.client.launch import DaemonAddress
from gymgate.stack.client.stack import Lease, Stack
from gymgate.stack.daemon.destinations import Destination
from gymgate.stack.daemon.process import Daemon
from gymgate.stack.daemon.running_environment import ServerSet
from gymgate.stack.daemon.running_stack import RunningStack
from support.upstream import Script, Seen, chat_answer, responses_answer, upstream

ENDPOINT = HTTPEndpoint(base_url="http://127.0.0.1:9/v1")
CONFIG = StackConfig(environments=("none",))
ROW: dict[str, Any] = {"responses_create_params": {"input": "hi"}}


class Scripted:
    """An environment whose agent listens at `port`."""

    name = "scripted"
    plan = SimpleNamespace(
        destination=lambda name, taskset: Destination("agent", "agent", "body", frozenset()),
        untrainable=lambda agent: None,
        packaged_graders={},
    )
    tasksets: frozenset[str] = frozenset()
    judges: frozenset[str] = frozenset()

    def __init__(self, port: int) -> None:
        self.port = port
        self.agents = self.row_targets = {"agent": "simple_agent"}
        self.agent_processes: dict[str, Any] = {}

    async def server_set(self) -> ServerSet:
        return ServerSet(0)

    @contextlib.contextmanager
    def server_port(self, server: str) -> Iterator[int]:
        yield self.port

    def remove_containers(self, *args: Any, **settings: Any) -> None:
        """There are none."""

    def describe(self) -> dict[str, Any]:
        return {}

    def never_asked_error(self, *args: Any) -> None:
        """Its agents may score a row without a model call."""


class Up(Daemon):
    """A daemon whose stack runs, with its gateway and a scripted environment."""

    alone: RunningStack

    async def started(self, config: StackConfig) -> RunningStack:
        return self.alone

    @property
    def running(self) -> RunningStack:
        return self.alone


async def scores(seen: Seen) -> web.Response:
    """An agent that asks the policy once and is scored."""
    url = f"{seen.body['policy_base_url']}/responses"
    async with aiohttp.ClientSession() as http, http.post(url, json={"input": "hi"}) as response:
        return web.json_response({"reward": 1.0, "response": await response.json()})


@asynccontextmanager
async def serving(directory: Path, agent: Script = scores) -> AsyncIterator[Up]:
    """A daemon that serves on this event loop."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "s.sock"))
        listener.listen()
        daemon = Up(listener, directory / "s.sock", directory, os.getpid())
        daemon.alone = RunningStack(CONFIG, directory, print)
        async with upstream(agent) as server, daemon.alone.gateway, daemon.alone.client:
            environment: Any = Scripted(int(server.url.split(":")[2].removesuffix("/v1")))
            daemon.alone.environments["scripted"] = environment
            listening = await asyncio.get_running_loop().create_unix_server(daemon._connected, sock=listener)
            try:
                yield daemon
            finally:
                listening.close()
                for session in [*daemon.leases]:
                    session.peer.abort()
                    await session.peer.lost.wait()


@asynccontextmanager
async def joined(directory: Path, *, reconnect: bool = False) -> AsyncIterator[Stack]:
    """A stack of this event loop on the daemon that serves in `directory`."""

    async def take() -> Lease:
        connection = Lease(DaemonAddress(directory / "s.sock", directory).describe_loss, None)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: connection.peer, str(directory / "s.sock"))
        await connection.hello(CONFIG)
        return connection

    async def release(connection: Lease) -> None:
        connection.peer.abort()

    stack = await Stack._open(CONFIG, take, release, reconnect=reconnect)
    try:
        yield stack
    finally:
        await stack.close()


async def test_a_rollout_leaves_no_route_and_no_function(tmp_path: Path) -> None:
    """However it ends; what was registered by name stays until it is unregistered."""
    asked = asyncio.Event()

    async def waits(body: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    async with serving(tmp_path) as daemon, joined(tmp_path) as stack:
        kept = stack.register("kept", lambda body: responses_answer("kept"), dialect="responses")
        answered = await stack.run(ROW, policy=lambda body: chat_answer("mine"))
        assert "mine" in str(answered.result)
        assert "kept" in str((await stack.run(ROW, policy=kept)).result)
        running = asyncio.create_task(stack.run(ROW, policy=waits))
        await asked.wait()
        assert len(daemon.running.gateway.routes) == 1
        assert len(stack._callables) == 2
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert list(stack._callables) == ["kept"]
        async with asyncio.timeout(10):
            while daemon.running.gateway.routes:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_an_agent_that_is_named_runs_the_row_of_an_environment_server(tmp_path: Path) -> None:
    chosen: list[str] = []

    def destination(name: str, taskset: str | None) -> Destination:
        chosen.append(name)
        return Destination("agent", "agent", "body", frozenset())

    row = {**ROW, "_ng_environment_server": "owner"}
    async with serving(tmp_path) as daemon, joined(tmp_path) as stack:
        environment: Any = daemon.alone.environments["scripted"]
        environment.row_targets = {**environment.agents, "owner": "owner"}
        environment.plan = SimpleNamespace(**{**vars(Scripted.plan), "destination": destination})
        for named in ("agent", None):
            rollout = await stack.run(row, policy=lambda body: chat_answer("mine"), agent=named)
            assert (rollout.error, rollout.reward) == (None, 1.0)
    assert chosen == ["agent", "owner"]


@pytest.mark.parametrize("strategy", ["url", "metadata", "remote", "body"])
async def test_a_rollouts_key_reaches_its_agent(tmp_path: Path, strategy: str) -> None:
    async def asks(seen: Seen) -> web.Response:
        entries = seen.body["responses_create_params"].get("metadata", {})
        body: dict[str, Any] = {"input": "hi"}
        if strategy == "url":
            url = f"{daemon.running.gateway.url}/ng-rollout/{seen.body['_ng_rollout_id']}/v1"
        elif strategy == "metadata":
            url, body = f"{daemon.running.gateway.url}/v1", {**body, "metadata": entries}
        else:
            url = seen.body["policy_base_url"] if strategy == "body" else entries["gymgate_route"]
        async with aiohttp.ClientSession() as http, http.post(f"{url}/responses", json=body) as response:
            return web.json_response({"reward": 1.0, "response": await response.json()})

    chosen: Any = Destination("agent", "agent", strategy, frozenset())  # type: ignore[arg-type]
    plan = {**vars(Scripted.plan), "destination": lambda name, taskset: chosen}
    async with serving(tmp_path, asks) as daemon, joined(tmp_path) as stack:
        environment: Any = daemon.alone.environments["scripted"]
        environment.plan = SimpleNamespace(**plan)
        rollout = await stack.run(ROW, policy=lambda body: chat_answer("mine"))
    assert (rollout.error, rollout.reward, len(rollout.calls)) == (None, 1.0, 1)
    assert "mine" in str(rollout.result)


async def test_an_agent_that_drops_its_key_is_said_to_do_so(tmp_path: Path) -> None:
    async def asks(seen: Seen) -> web.Response:
        url = f"{daemon.running.gateway.url}/v1/responses"
        async with aiohttp.ClientSession() as http, http.post(url, json={"input": "hi"}) as response:
            return web.json_response(await response.json(), status=500)

    async with serving(tmp_path, asks) as daemon, joined(tmp_path) as stack:
        rollout = await stack.run(ROW, policy=lambda body: chat_answer())
    assert rollout.error is not None
    assert "--routing process" in rollout.error.message.partition(":")[0]
    assert (rollout.error.kind, rollout.calls) == ("environment", [])


async def test_a_lost_connections_rollouts_end(tmp_path: Path) -> None:
    """With the calls that are under way in them; those of others go on."""
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def waits(seen: Seen) -> web.Response:
        asked.set()
        try:
            return await asyncio.Event().wait()  # type: ignore[func-returns-value]
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with (
        upstream(waits) as policy,
        serving(tmp_path) as daemon,
        joined(tmp_path) as other,
        joined(tmp_path) as stack,
    ):
        routes = daemon.running.gateway.routes
        others = daemon.running.gateway.open(ENDPOINT)
        running = asyncio.create_task(stack.run(ROW, policy=policy.endpoint(dialect="responses")))
        await asked.wait()
        stack._last.peer.abort()
        with pytest.raises(StackLostError):
            await running
        await cancelled.wait()
        async with asyncio.timeout(10):
            while list(routes.values()) != [others]:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert (await other.run(ROW, policy=lambda body: chat_answer())).reward == 1.0


async def test_an_agents_request_with_half_a_character_reaches_its_policy(tmp_path: Path) -> None:
    """As CLI agents send it, which cut their tools' output anywhere."""
    seen = []

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body["messages"][0]["content"])
        return chat_answer()

    async def cuts(asked: Seen) -> web.Response:
        url = f"{asked.body['policy_base_url']}/chat/completions"
        body = b'{"model":"m","messages":[{"role":"user","content":"a\\ud83d"}]}'
        async with aiohttp.ClientSession() as http:
            async with http.post(url, data=b"[" * 5_000) as answer:
                assert answer.status == 400
            async with http.post(url, data=body) as answer:
                assert answer.status == 200
        return web.json_response({"reward": 1.0, "response": responses_answer()})

    async with serving(tmp_path, cuts), joined(tmp_path) as stack:
        rollout = await stack.run(ROW, policy=policy, record_bodies=True)
    (call,) = rollout.calls
    assert seen == ["a\ufffd"]
    assert call.request == {"model": "m", "messages": [{"role": "user", "content": "a\ufffd"}]}


async def test_a_number_beyond_64_bits_comes_back_beside_recorded_calls(tmp_path: Path) -> None:
    """The calls are text already, which is then written by another library than usual."""

    async def scores_long(seen: Seen) -> web.Response:
        result = json.loads((await scores(seen)).body or b"")
        return web.json_response({**result, "found": 2**70})

    async with serving(tmp_path, scores_long), joined(tmp_path) as stack:
        rollout = await stack.run(ROW, policy=lambda body: chat_answer("mine"), record_bodies=True)
    (call,) = rollout.calls
    assert (rollout.error, rollout.reward, (rollout.result or {})["found"]) == (None, 1.0, 2**70)
    assert "mine" in str(call.response)
    assert call.request == {"input": "hi"}


async def test_a_callable_runs_on_the_loop_that_called_run(tmp_path: Path) -> None:
    """A coroutine function does, on each of two loops at once; a plain one has a thread of its own."""
    both = threading.Barrier(2, timeout=30)

    async def on_a_loop() -> set[object]:
        found: set[object] = set()

        async def policy(body: dict[str, Any]) -> dict[str, Any]:
            found.add(asyncio.get_running_loop())
            await asyncio.to_thread(both.wait)  # the other one's call is under way, too
            return chat_answer()

        async with joined(tmp_path) as stack:
            assert (await stack.run(ROW, policy=policy)).reward == 1.0
            assert found == {asyncio.get_running_loop()}
        return found

    async with serving(tmp_path):
        loops = await asyncio.gather(*(asyncio.to_thread(asyncio.run, on_a_loop()) for _ in range(2)))
    assert loops[0] != loops[1]


async def scores_at_once(seen: Seen) -> web.Response:
    """An agent that asks nobody."""
    return web.json_response({"reward": 1.0, "response": responses_answer()})


def endpoints_sent(daemon: Up) -> list[dict[str, Any]]:
    """The endpoints that the daemon's one lease registers from now on, as they come."""
    [holder] = daemon.leases
    register, sent = holder.peer.listeners["register"], []

    def note(message: dict[str, Any]) -> None:
        sent.append(message["endpoint"])
        register(message)

    holder.peer.listeners["register"] = note
    return sent


def pools(daemon: Up) -> int:
    """How many the gateway has once nothing holds them by a cycle."""
    gc.collect()
    return len(daemon.running.gateway._pools)


async def test_equal_endpoints_are_sent_once(tmp_path: Path) -> None:
    """Also by rollouts at once, as policy and as judge. What is equal for Python but not in JSON is another endpoint."""
    async with serving(tmp_path, scores_at_once) as daemon, joined(tmp_path) as stack:
        sent = endpoints_sent(daemon)
        running = (
            stack.run(ROW, policy=ENDPOINT.model_copy(), judge_policy=ENDPOINT.model_copy()) for _ in range(9)
        )
        assert {rollout.reward for rollout in await asyncio.gather(*running)} == {1.0}
        assert [endpoint["base_url"] for endpoint in sent] == [ENDPOINT.base_url]
        for logprobs in (1, True, 1.0, True):
            await stack.run(ROW, policy=ENDPOINT.model_copy(update={"sampling": (("logprobs", logprobs),)}))
        assert [repr(endpoint["sampling"]) for endpoint in sent[1:]] == [
            repr([["logprobs", value]]) for value in (1, True, 1.0)
        ]


async def test_a_new_lease_sends_its_endpoints_again(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, scores_at_once) as daemon,
        joined(tmp_path),  # keeps the daemon up
        joined(tmp_path, reconnect=True) as stack,
    ):
        leases = {*daemon.leases}
        await stack.run(ROW, policy=ENDPOINT)
        [used] = [lease for lease in leases if lease._endpoints]
        used.peer.abort()
        await stack._last.peer.lost.wait()
        assert used._endpoints == {}
        assert (await stack.run(ROW, policy=ENDPOINT)).reward == 1.0
        [again] = daemon.leases - leases
        assert len(again._endpoints) == 1


async def test_an_endpoint_that_cannot_be_used_fails_its_rollouts_only(tmp_path: Path) -> None:
    broken = ENDPOINT.model_copy(update={"headers": (("bad name", SecretStr("x")),)})
    async with serving(tmp_path, scores_at_once), joined(tmp_path) as stack:
        for _ in range(2):
            with pytest.raises(ConfigError):
                await stack.run(ROW, policy=broken)
            assert (await stack.run(ROW, policy=ENDPOINT)).reward == 1.0


async def test_rollouts_with_endpoints_of_their_own_leave_nothing(tmp_path: Path) -> None:
    """2,000, each with a key and replicas of its own, 50 at a time."""
    numbers = itertools.count()

    async def run_some(stack: Stack) -> None:
        for number in itertools.islice(numbers, 40):
            url = f"http://127.0.0.1:9/{number}"
            own = HTTPEndpoint(base_url=f"{url}/a", replicas=(f"{url}/b",), api_key=SecretStr(f"k{number}"))
            assert (await stack.run(ROW, policy=own)).reward == 1.0

    async with serving(tmp_path, scores_at_once) as daemon:
        async with joined(tmp_path) as stack:
            [holder] = daemon.leases
            await asyncio.gather(*(run_some(stack) for _ in range(50)))
            assert next(numbers) == 2000
            await stack.status()  # the daemon has read all that was sent before
            assert len(stack._last.endpoints._registered) == len(holder._endpoints) == pools(daemon) == KEPT
        await holder.peer.lost.wait()
        assert (holder._endpoints, pools(daemon)) == ({}, 0)


async def test_leases_share_the_state_of_replicas_until_the_last_has_gone(tmp_path: Path) -> None:
    """One of two replicas never answers. No later rollout tries it, whichever lease it is of."""
    failed: list[str] = []

    async def fails(seen: Seen) -> web.Response:
        failed.append(seen.path)
        return web.json_response({"error": "down"}, status=500)

    async def answers(seen: Seen) -> web.Response:
        return web.json_response(chat_answer())

    async with serving(tmp_path) as daemon, upstream(fails) as down, upstream(answers) as up:
        gateway = daemon.running.gateway
        async with joined(tmp_path) as first:
            for temperature in (0.1, 0.2, 0.3):  # the endpoints differ, their replicas do not
                policy = down.endpoint(replicas=(up.url,), sampling={"temperature": temperature})
                assert (await first.run(ROW, policy=policy)).reward == 1.0
                assert (gateway.routes, len(failed)) == ({}, 1)
            async with joined(tmp_path) as second:
                assert (await second.run(ROW, policy=policy)).reward == 1.0
                assert (pools(daemon), len(failed)) == (1, 1)
                leases = [*daemon.leases]
                await first.close()
                assert (pools(daemon), gateway.replicas[up.url]["served"]) == (1, 4)
        for lease in leases:
            await lease.peer.lost.wait()
        assert pools(daemon) == 0


def test_2048_rollouts_at_once_while_the_daemon_is_blocked(tmp_path: Path) -> None:
    """Its loop stands still for a second: they wait for it, and none fails."""
    up: list[asyncio.AbstractEventLoop] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving(tmp_path, scores_at_once):
            up.append(asyncio.get_running_loop())
            ready.set()
            await asyncio.to_thread(over.wait)

    async def run_all() -> list[Rollout]:
        async with joined(tmp_path) as stack:
            up[0].call_soon_threadsafe(time.sleep, 1.0)
            limits = RolloutLimits(timeout_s=100)
            running = (stack.run(ROW, policy=ENDPOINT, limits=limits) for _ in range(2048))
            return await asyncio.gather(*running)

    daemon = threading.Thread(target=asyncio.run, args=(serve(),))
    daemon.start()
    try:
        assert ready.wait(30)
        rollouts = asyncio.run(run_all())
    finally:
        over.set()
        daemon.join(30)
    assert [rollout.error for rollout in rollouts if rollout.reward != 1.0] == []
    assert len({rollout.id for rollout in rollouts}) == 2048
