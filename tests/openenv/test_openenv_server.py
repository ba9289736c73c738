"""`gymgate serve-env` as a user runs it, played by OpenEnv's own clients."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openenv.core import GenericEnvClient, SyncEnvClient
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from gymgate.integrations.openenv import env_server
from gymgate.integrations.openenv.episode import NOT_FOUND, ToolEpisode
from support.upstream import Seen, upstream

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "gymgate", "serve-env"]
COUNTER = "example_session_state_mgmt"
START_S = 300.0
PROGRAM = Path(__file__).parents[2] / "examples/openenv/play.py"


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The base URL of a server, which a signal ends."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        assert ready, "no address"
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def refusal(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@contextmanager
def client_of(url: str) -> Iterator[SyncEnvClient]:
    with GenericEnvClient(base_url=url).sync() as client:
        yield client


@pytest.fixture(scope="module")
def counter() -> Iterator[str]:
    """Its resources server is two processes, each with the sessions of its own clients."""
    workers = f"{COUNTER}_resources_server.resources_servers.{COUNTER}.num_workers=2"
    with served(COUNTER, "--max-sessions", "2", "--set", workers) as url:
        yield url


def increment(client: Any, count: int) -> Any:
    return client.step({"type": "call_tool", "tool_name": "increment_counter", "arguments": {"count": count}})


def test_concurrent_clients_have_sessions_of_their_own(counter: str) -> None:
    with client_of(counter) as one, client_of(counter) as two:
        first, second = one.reset(index=0, episode_id="a"), two.reset(index=1)
        assert first.observation["messages"] == [
            {"role": "user", "content": "add 1 then add 2 then get the count"}
        ]
        assert "add 4" in second.observation["messages"][0]["content"]
        for client, count in ((one, 1), (two, 4), (one, 2)):
            step = increment(client, count)
            assert (step.observation["result"], step.reward, step.done) == ('{"success":true}', None, False)
        value = one.step({"type": "call_tool", "tool_name": "get_counter_value"})
        assert value.observation["result"] == '{"count":6}'
        assert one.state()["step_count"] == 3
        ended = one.step({"type": "message", "content": "6"})
        assert (ended.reward, ended.done, ended.metadata) == (1.0, True, {"outcome": "completed"})
        state = one.state()
        assert (state["episode_id"], state["index"], state["done"]) == ("a", 0, True)
        wrong = two.step({"type": "message", "content": "10"})  # 5 is missing
        assert (wrong.reward, wrong.done) == (0.0, True)
        with pytest.raises(RuntimeError, match="reset"):
            increment(two, 5)
        with pytest.raises(RuntimeError, match="capacity"), client_of(counter) as three:
            three.reset()
        again = two.reset(index=1)
        assert not again.done
        increment(two, 4)
        increment(two, 5)
        assert two.step({"type": "message", "content": "15"}).reward == 1.0


def test_every_episode_has_an_id_and_a_message_needs_content(counter: str) -> None:
    with client_of(counter) as client:
        ids = set()
        for _ in range(2):
            client.reset(index=0)
            ids.add(client.state()["episode_id"])
        assert len(ids - {None, ""}) == 2
        for count in (1, 2):
            increment(client, count)
        for empty in ({}, {"content": None}):
            with pytest.raises(RuntimeError, match="content"):
                client.step({"type": "message", **empty})
        assert (client.state()["done"], client.state()["step_count"]) == (False, 2)
        ended = client.step({"type": "message", "content": ""})
        assert (ended.done, ended.reward) == (True, 1.0)  # the counter is right


def test_a_reset_without_a_session_is_answered_and_holds_up_nobody(counter: str) -> None:
    """OpenEnv's server makes an environment for such a request and closes it in its event loop."""
    request = urllib.request.Request(f"{counter}/reset", b"{}", {"Content-Type": "application/json"})
    with client_of(counter) as client:
        client.reset(index=0)
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert json.load(answer)["observation"]["messages"]
        assert increment(client, 1).observation["result"] == '{"success":true}'


def test_what_is_no_tool_is_answered_as_one_that_is_missing(counter: str) -> None:
    with client_of(counter) as client:
        with pytest.raises(RuntimeError, match="reset"):
            increment(client, 1)
        with pytest.raises(RuntimeError, match=r"index=99: .*\b0 to \d+"):
            client.reset(index=99)
        client.reset(index=0)
        for name in (
            "verify",
            "verify/",
            "seed_session/",
            "aggregate_metrics/",
            "/",
            "nonesuch",
            "../seed_session",
            "",
        ):
            step = client.step({"type": "call_tool", "tool_name": name, "arguments": {}})
            assert (step.observation["result"], step.reward) == ('{"detail":"Not Found"}', None)
        bad = client.step(
            {"type": "call_tool", "tool_name": "increment_counter", "arguments": {"count": "x"}}
        )
        assert "int_parsing" in bad.observation["result"]


def test_a_tool_reaches_no_other_route() -> None:
    """A model that calls `verify/`, which the server redirects to `/verify`, would get its reward in mid-episode."""
    asked: list[str] = []

    async def script(seen: Seen) -> web.Response:
        asked.append(seen.path)
        return web.Response(status=307, headers={"Location": "/verify"}, text="moved")

    async def calls(*names: str) -> list[str | None]:
        tools = [{"type": "function", "name": name} for name in ("offered", "verify")]
        async with upstream(script) as serving:
            url = serving.url.removesuffix("/v1")
            episode = ToolEpisode(url, "s", {"responses_create_params": {"tools": tools}}, timeout_s=10)
            try:
                return [(await episode.call_tool(name, {})).result for name in names]
            finally:
                await episode.close()

    assert asyncio.run(calls("verify", "verify/", "hidden", "offered")) == [NOT_FOUND] * 3 + ["moved"]
    assert asked == ["/offered"]


def test_the_tools_of_the_row_are_listed(counter: str) -> None:
    with client_of(counter) as client:
        client.reset(index=0)
        tools = client.step({"type": "list_tools"}).observation["tools"]
        assert [tool["name"] for tool in tools] == ["increment_counter", "get_counter_value"]
        assert tools[0]["input_schema"]["required"] == ["count"]


def test_a_gymnasium_environment_gives_a_reward_for_each_step() -> None:
    with served("blackjack") as url, client_of(url) as client:
        start = client.reset()
        assert [message["role"] for message in start.observation["messages"]] == ["system", "user", "user"]
        assert "Your hand" in start.observation["messages"][-1]["content"]
        step = client.step({"type": "message", "content": "<action>stand</action>"})
        assert step.done
        assert step.reward in (-1.0, 0.0, 1.0)
        assert step.metadata["result"] in ("win", "draw", "loss")
        while True:
            start = client.reset()
            step = client.step({"type": "message", "content": "<action>hit</action>"})
            if not step.done:
                break
        assert (step.reward, step.observation["messages"][0]["role"]) == (0.0, "user")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["simpleqa"], "(genrm_model)"),
        (["tau2"], "simple_agent or gymnasium_agent"),
        ([COUNTER, "--agent", "x"], "example_session_state_mgmt_simple_agent"),
        ([COUNTER, "--host", "300.1.1.1"], "300.1.1.1:8000"),
        (["nonesuch"], "nonesuch"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(arguments: list[str], reason: str) -> None:
    line = refusal(*arguments)
    assert line.startswith("gymgate: ")
    assert reason in line


def test_a_web_page_is_refused(counter: str) -> None:
    address = counter.replace("http", "ws", 1) + "/ws"
    with connect(address):
        pass
    with pytest.raises(InvalidStatus, match="403"), connect(address, origin=Origin("http://elsewhere")):
        pass
    request = urllib.request.Request(f"{counter}/health", headers={"Origin": "http://elsewhere"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=30)


def test_a_request_for_another_hosts_name_is_refused(counter: str) -> None:
    """A web site can have its own name resolved to this machine."""
    requests = {
        host: urllib.request.Request(f"{counter}/health", headers={"Host": host})
        for host in ("evil.example", "localhost:1", "[::1]")
    }
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(requests.pop("evil.example"), timeout=30)
    for host, request in requests.items():
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200, host


def test_the_example_plays(counter: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), counter], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ['get_counter_value {} -> {"count":6}', "reward 1.0"]


def test_a_port_that_is_taken_is_refused_before_anything_starts(counter: str) -> None:
    port = counter.rpartition(":")[2]
    line = refusal(COUNTER, "--port", port)
    assert line.startswith("gymgate: ")
    assert f"127.0.0.1:{port}: Address already in use" in line


@pytest.mark.parametrize("says", [["websocket.connect"], ["websocket.connect", "websocket.receive"]])
async def test_a_silent_session_gives_up_its_place(says: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_server, "FIRST_MESSAGE_S", 0.1)
    monkeypatch.setattr(env_server, "SILENCE_S", 0.1)
    said = asyncio.Queue[dict[str, Any]]()
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "websocket.disconnect":
            heard.append(message["type"])

    for message in says:
        said.put_nowait({"type": message})
    async with asyncio.timeout(10):
        await env_server.Doorkeeper(app)({"type": "websocket", "headers": []}, said.get, said.put)
    assert heard == says
