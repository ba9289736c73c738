"""NeMo Gym's servers with lean middlewares behave as with the release's own: the same requests to one of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gymgate.core.config import SUPPORTED_NEMO_GYM
from gymgate.stack import acquire
from support.lean import Served, both, comparable, http, logs_of, shut_down
from support.stacks import stack_config

pytestmark = pytest.mark.gym

BIG = "y" * 1_000_000
JSON_TYPE = "content-type: application/json"
CHUNKED = "transfer-encoding: chunked"
REQUESTS = {
    "a question": http("POST", "/ok", {"text": "a", "number": 3}),
    "within a rollout": http("POST", "/ng-rollout/abc-1/ok", {"text": "a"}),
    "with a query": http("GET", "/plain?a=1&b=%20"),
    "with a body that is not JSON": http("POST", "/ok", b"{", JSON_TYPE),
    "with a field of the wrong type": http("POST", "/ok", {"text": 1}),
    "without a body": http("POST", "/ok"),
    "with an unpaired surrogate": http("POST", "/ok", b'{"text": "\\ud800"}', JSON_TYPE),
    "of no route": http("GET", "/nowhere"),
    "with another method": http("PUT", "/ok", {"text": "a"}),
    "a path with a slash at its end": http("POST", "/ok/", {"text": "a"}),
    "HEAD": http("HEAD", "/plain"),
    "HEAD of no route": http("HEAD", "/nowhere"),
    "OPTIONS": http("OPTIONS", "/ok"),
    "the liveness": http("GET", "/"),
    "a plain answer": http("GET", "/plain"),
    "HTTP/1.0": b"GET /plain HTTP/1.0\r\n\r\n",
    "a function in a thread": http("GET", "/plain_function"),
    "an empty answer": http("GET", "/empty"),
    "an answer with cookies": http("GET", "/cookies"),
    "a cookie that is not signed": http("POST", "/ok", {"text": "a"}, "cookie: Server___server=abc"),
    "a cookie that was changed": http(
        "POST",
        "/ok",
        {"text": "a"},
        "cookie: Server___server=eyJhIjogMX0=.aaaaaa.bbbbbbbbbbbbbbbbbbbbbbbbbbb",
    ),
    "other cookies": http("POST", "/ok", {"text": "a"}, 'cookie: a=b; c="d e"; =; Server___server='),
    "a session that is changed": http("POST", "/session"),
    "a session that is cleared": http("POST", "/clear"),
    "a megabyte both ways": http("POST", "/big", {"text": BIG}),
    "chunked": http("POST", "/ok", b'b\r\n{"text": "a"\r\n1\r\n}\r\n0\r\n\r\n', JSON_TYPE, CHUNKED),
    "chunked and broken": http("POST", "/ok", b"zz\r\n", JSON_TYPE, CHUNKED),
    "a megabyte to an application of its own": http("POST", "/slowly/x", BIG.encode()),
    "expecting to go on": http("POST", "/raw", b"123", "expect: 100-continue"),
    "an exception": http("GET", "/boom"),
    "an exception with odd text": http("GET", "/unprintable"),
    "an HTTP exception": http("GET", "/teapot"),
    "an upstream's error": http("GET", "/upstream"),
    "an upstream's error without content": http("GET", "/reason"),
    "a panic": http("GET", "/panic"),
    "a stray cancellation": http("GET", "/stray"),
    "a task that was cancelled": http("GET", "/stray_task"),
    "a timeout": http("GET", "/timeout"),
    "a timeout that is caught": http("GET", "/caught_timeout"),
    "a dependency": http("GET", "/depends"),
    "a dependency of a failure": http("GET", "/depends_boom"),
    "a stream": http("GET", "/stream"),
    "HEAD of a stream": http("HEAD", "/stream"),
    "a stream of nothing": http("GET", "/stream_empty"),
    "a stream that fails": http("GET", "/stream_boom"),
    "a stream that fails first": http("GET", "/stream_boom_first"),
    "a stream that is too short": http("GET", "/stream_short"),
    "a stream that is too long": http("GET", "/stream_long"),
    "a stream that fails and is too short": http("GET", "/stream_short_boom"),
    "a header that is refused": http("GET", "/bad_header"),
    "a task in the background": http("GET", "/background"),
    "a failing task in the background": http("GET", "/background_boom"),
    "a task in the background that reads on": http("GET", "/background_receive"),
    "no answer at all": http("GET", "/nothing/x"),
    "an answer that does not end": http("GET", "/no_end/x"),
    "two answers": http("GET", "/twice/x"),
}

ENDS = {
    "a dependency": "dependency closed",
    "a dependency of a failure": "dependency closed",
    "a task in the background": "background ran",
    "a task in the background that reads on": "background is told of http.disconnect",
}
"""What a server does last, perhaps after the answer."""


@pytest.fixture(params=SUPPORTED_NEMO_GYM, scope="module")
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def servers(version: str, tmp_path: Path) -> AsyncIterator[tuple[Served, Served]]:
    async with both(version, tmp_path) as pair:
        assert json.loads(pair[1].noted.read_text()) == {}  # nothing stays the release's
        assert not pair[0].noted.exists()
        yield pair


async def test_answers_logs_and_state_are_the_same(servers: tuple[Served, Served]) -> None:
    assert len(REQUESTS) >= 40
    stock, lean = servers
    for name, request in REQUESTS.items():
        expected, answer = [await served.ask(request) for served in servers]
        assert comparable(answer, lean.port) == comparable(expected, stock.port), name
        if name in ENDS:
            for served in servers:
                await served.until(ENDS[name])
        assert await lean.events() == await stock.events(), name
        logs = await logs_of(servers)
        assert logs[1] == logs[0], name


HANG_UPS = {
    "before the request is complete": (http("POST", "/wait", {"a": 1})[:40], ()),
    "in the body": (http("POST", "/wait", {"a": 1})[:-3], ()),
    "in a chunked body": (http("POST", "/raw", b"b\r\n{", CHUNKED), ()),
    "while a handler waits": (http("POST", "/wait", {"a": 1}), ("wait waits",)),
    "without a body": (http("GET", "/wait_plain"), ("wait_plain waits",)),
    "within a rollout": (http("GET", "/ng-rollout/a-1/wait_plain"), ("wait_plain waits",)),
    "with 100 KB unread": (http("POST", "/wait_unread", b"x" * 100_000), ("wait_unread waits",)),
    "with a megabyte unread": (http("POST", "/wait_unread", b"x" * 1_000_000), ("wait_unread waits",)),
    "after a megabyte": (http("POST", "/wait_bytes", b"x" * 1_000_000), ("wait_bytes waits",)),
    "in a wait with a timeout": (http("GET", "/wait_for_never"), ("wait_for_never waits",)),
    "while one handler waits twice": (http("GET", "/wait_twice"), ("wait_twice waits",)),
    "while a handler cleans up": (http("GET", "/wait_cleaning"), ("wait_cleaning waits",)),
    "in a stream": (http("GET", "/stream_forever"), ("stream begins",)),
    "in the background": (http("GET", "/background_wait"), ("background waits",)),
}
AFTER = {
    "while one handler waits twice": (
        "wait_twice cancelled",
        "wait_twice again waits",
        "wait_twice again cancelled",
    ),
    "in the background": ("background went on",),
}
"""What a server does after a hang-up, in place of cancelling what waits."""
LOGGED = {("0.6.0", "in a chunked body"): "repr(e): ClientDisconnect()"}
"""The last line that a hang-up leaves in the log, where it leaves any."""
CANCELS = {"0.7.0": True, "0.6.0": False}
"""Whether a release cancels a request whose client hangs up."""


async def test_a_hang_up_cancels_what_it_cancels_in_the_release(
    servers: tuple[Served, Served], version: str
) -> None:
    for name, (request, begins) in HANG_UPS.items():
        for served in servers:
            _, writer = await served.open(request)
            await writer.drain()
            await served.until(*begins)
            writer.transport.abort() if "100 KB" in name else writer.close()
            if begins and name != "in a stream" and (CANCELS[version] or name == "in the background"):
                await served.until(*AFTER.get(name, (begins[-1].replace(" waits", " cancelled"),)))
        logs = await logs_of(servers, LOGGED.get((version, name)))
        # A generator that waits to send when it is cancelled ends whenever Python collects it.
        events = [[event for event in await served.events() if event != "stream ends"] for served in servers]
        assert events[1] == events[0], name
        assert logs[1] == logs[0], name


async def test_only_a_lean_server_collects_less_often(servers: tuple[Served, Served]) -> None:
    answers = [await served.ask(http("GET", "/collector")) for served in servers]
    stock, lean = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    assert lean == [50_000, 20, 50]
    assert stock[0] < lean[0]


async def test_every_hundredth_hang_up_is_logged(servers: tuple[Served, Served], version: str) -> None:
    if not CANCELS[version]:
        pytest.skip("this release does not listen for a hang-up")
    for served in servers:
        for number in range(100):
            _, writer = await served.open(http("GET", "/wait_plain"))
            await served.until("wait_plain waits")
            writer.close()
            await served.until("wait_plain cancelled")
            assert "499" not in served.child.log.read_text() or number == 99
    logs = await logs_of(servers)
    assert logs[1] == logs[0]
    assert "499" in "".join(logs[0])


@pytest.mark.parametrize("path", ["/wait_plain", "/wait_for_never", "/stream_forever", "/background_wait"])
async def test_a_shutdown_answers_what_is_under_way_as_the_release_does(
    servers: tuple[Served, Served], version: str, path: str
) -> None:
    answers, statuses = [], []
    for served in servers:
        reader, writer = await served.open(http("GET", path))
        while not any("waits" in event or "begins" in event for event in await served.events()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        statuses.append(await shut_down(served))
        answer = comparable(await reader.read(), served.port)
        answers.append(answer.replace(b"4\r\nmore\r\n", b""))
        writer.close()
    assert answers[1] == answers[0]
    assert statuses[1] == statuses[0]
    stock, lean = (served.messages() for served in servers)
    if version == "0.6.0" and path.startswith("/wait"):
        # There the handler runs on after this answer, and ends with the event loop; in the lean server it ends before the answer.
        stock.remove("ERROR:    Exception in ASGI application")
    assert lean == stock


async def test_an_exit_ends_the_server_as_in_the_release(servers: tuple[Served, Served]) -> None:
    answers, statuses = [], []
    for served in servers:
        answers.append(comparable(await served.ask(http("GET", "/exit")), served.port))
        async with asyncio.timeout(20):
            statuses.append(await asyncio.shield(served.child.exited))
    assert answers[1] == answers[0]
    assert statuses[1] == statuses[0]


async def test_a_thousand_requests_at_once_share_no_session(servers: tuple[Served, Served]) -> None:
    for served in servers:
        limit = asyncio.Semaphore(200)

        async def visit_twice(served: Served = served, limit: asyncio.Semaphore = limit) -> str:
            async with limit:
                first = await served.ask(http("POST", "/ok", {"text": "a"}))
                assert b'"visit":1' in first
                cookie = first.partition(b"set-cookie: ")[2].partition(b";")[0].decode()
                second = await served.ask(http("POST", "/ok", {"text": "a"}, f"cookie: {cookie}"))
                assert b'"visit":2' in second
                return cookie

        cookies = await asyncio.gather(*(visit_twice() for _ in range(1000)))
        assert len({*cookies}) == 1000


async def test_a_server_with_middlewares_of_its_own_keeps_all_of_the_release(
    version: str, tmp_path: Path
) -> None:
    async with both(version, tmp_path, "own_middleware.py") as servers:
        kept = json.loads(servers[1].noted.read_text())
        assert {*kept} >= {"setup_session_middleware", "setup_exception_middleware"}
        assert all("setup_exception_middleware" in reason for reason in kept.values())
        answers = [await served.ask(http("GET", "/boom")) for served in servers]
        assert b"x-own: yes" in answers[0]
        assert comparable(answers[1], servers[1].port) == comparable(answers[0], servers[0].port)
        assert "MCP" not in servers[1].child.log.read_text()
        assert "setup_exception_middleware" in servers[1].child.log.read_text()


async def test_a_server_whose_tools_are_exposed_over_mcp_keeps_its_session_middleware(
    version: str, tmp_path: Path
) -> None:
    async with both(version, tmp_path, "mcp_tools.py", expose_tools_over_mcp=True) as servers:
        kept = json.loads(servers[1].noted.read_text())
        assert {*kept} == {"setup_session_middleware"}
        answers = [await served.ask(http("POST", "/add", {"a": 1, "b": 2})) for served in servers]
        assert comparable(answers[1], servers[1].port) == comparable(answers[0], servers[0].port)
        assert b"200 OK" in answers[0]


@pytest.mark.parametrize("stock", [False, True])
async def test_a_run_notes_what_is_in_force_for_each_server(version: str, stock: bool) -> None:
    async with acquire(stack_config(version=version, stock_servers=stock)) as stack:
        [noted] = stack.description["settings"]["middlewares"].values()
    assert len(noted) == 2
    assert {*noted.values()} == {"as in NeMo Gym" if stock else "lean"}
