"""An HTTP server that answers JSON: what its failures are, and which requests are made again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from gymgate.core import codec, http_client
from gymgate.core.errors import PolicyError
from gymgate.core.http_client import HTTPClient, Request, Response, UnreachableError, proxy_for
from gymgate.core.json_server import CONTEXT_OVERFLOW, JSONServer, listed_models, message_in, shortened
from support.upstream import Seen, upstream


@pytest.fixture
async def client() -> AsyncIterator[HTTPClient]:
    async with HTTPClient() as made:
        yield made


def server(url: str, **settings: Any) -> JSONServer:
    return JSONServer(Request(url), "the server", **{"timeout_s": 5.0, "max_retries": 0, **settings})


async def refused(answers: JSONServer, client: HTTPClient) -> PolicyError:
    with pytest.raises(PolicyError) as raised:
        await answers.post(client, b"{}", {})
    return raised.value


@pytest.mark.parametrize(("status", "code"), [(400, CONTEXT_OVERFLOW), (500, None), (429, None)])
async def test_only_a_refused_request_is_too_long(status: int, code: str | None, client: HTTPClient) -> None:
    """And only a server that asks for time is waited for."""

    async def script(seen: Seen) -> web.Response:
        error = {"message": "This model's maximum context length is 10 tokens", "code": code}
        return web.json_response({"error": error, "message": "bad request"}, status=status)

    async with upstream(script) as api:
        asked = server(api.url)
        error = await refused(asked, client)
    assert error.code == code
    assert "10 tokens" in error.message
    assert (asked.rate_limit is error) == (status == 429)


async def test_a_server_that_is_too_slow_is_not_asked_again(client: HTTPClient) -> None:
    async def script(seen: Seen) -> web.Response:
        return await asyncio.Event().wait()  # type: ignore[func-returns-value]

    async with upstream(script) as api:
        error = await refused(server(api.url, timeout_s=0.1, max_retries=3), client)
        assert len(api.seen) == 1
    assert not error.retryable


async def test_a_wrong_certificate_stays_wrong(client: HTTPClient, monkeypatch: pytest.MonkeyPatch) -> None:
    dials = []

    async def dial(request: Request, connection: object) -> None:
        dials.append(request)
        raise ssl.SSLCertVerificationError("self-signed")

    monkeypatch.setattr(http_client, "_dial", dial)
    error = await refused(server("https://models.example/v1", max_retries=3), client)
    assert isinstance(error.__cause__, UnreachableError)
    assert len(dials) == 1


def test_a_message_is_the_errors_own_on_one_short_line() -> None:
    assert message_in({"error": {"message": "why"}, "message": "Bad Request"}) == "why"
    assert shortened("a\n b") == "a b"
    assert shortened("a" + " " * 5000) == "a..."
    assert len(shortened("word " * 1000)) == 300


def test_this_machine_has_no_proxy_and_no_connection_serves_both_schemes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:8080")
    for host in ("localhost", "127.0.0.1", "127.3.2.1", "[::1]"):
        assert proxy_for(URL(f"http://{host}:81/v1")) is None
    assert proxy_for(URL("http://models.example/v1")) == URL("http://proxy.example:8080")
    plain, secret = Request("http://127.0.0.1:81/"), Request("https://127.0.0.1:81/")
    assert plain.address != secret.address


def test_a_list_of_models_is_bounded_as_an_answer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 60 MB took 28 s and 1.7 GB."""
    answer = Response(200, {}, b'{"data": [%b]}' % b", ".join([b'{"id": "m"}'] * 20))
    assert len(listed_models(answer) or ()) == 20
    monkeypatch.setattr(codec, "MAX_VALUES", 10)
    assert listed_models(answer) is None
