"""What a request or an answer can cost: the key comes first, sizes have an end, compression is not undone unseen."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gymgate.core import codec, http_client
from gymgate.gateway.server import Gateway
from support.upstream import RawConnection, Seen, Upstream, chat_answer, upstream

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = json.dumps(BODY).encode()
UNKNOWN = "0" * 32


@pytest.fixture
async def gateway(policy: Upstream) -> AsyncIterator[Gateway]:
    async with Gateway(judges={"judge": policy.endpoint()}) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """A limit that a test can go beyond."""
    monkeypatch.setattr(http_client, "MAX_BODY", 100_000)
    return 100_000


@pytest.mark.parametrize("path", [f"/ng-rollout/{UNKNOWN}/v1/chat/completions", "/v1/chat/completions"])
async def test_a_large_body_is_refused_before_it_is_sent(path: str, gateway: Gateway, small: int) -> None:
    connection = await RawConnection.open(gateway.port)
    head = [
        f"POST {path} HTTP/1.1",
        "Host: g",
        f"Content-Length: {small + 1}",
        "Expect: 100-continue",
        "",
        "",
    ]
    connection.writer.write("\r\n".join(head).encode())
    status, answer = await connection.answer()
    assert status == 413
    assert f"longer than {small} bytes" in json.loads(answer)["error"]["message"]
    await connection.drop()


async def test_a_body_without_length_is_read_to_the_limit(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession, small: int
) -> None:
    route = gateway.open(policy.endpoint())

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * (small // 2)

    async with http.post(f"{route.base_url}/chat/completions", data=pieces()) as response:
        assert response.status == 413
    async with http.post(f"{route.base_url}/chat/completions", json=BODY) as response:
        assert response.status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
async def test_a_compressed_request_is_refused(
    encoding: str, gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    route = gateway.open(policy.endpoint())
    headers = {"Content-Encoding": encoding}
    url = f"{route.base_url}/chat/completions"
    async with http.post(url, data=gzip.compress(PLAIN), headers=headers) as response:
        assert response.status == 415
        assert "uncompressed" in (await response.json())["error"]["message"]
    async with http.post(url, data=PLAIN, headers={"Content-Encoding": "identity"}) as response:
        assert response.status == 200
    assert len(policy.seen) == 1


MANY = {
    "objects": b"[" + b"{}," * 2_000_000 + b"0]",
    "numbers": b"[" + b"0," * 10_000_000 + b"0]",
}


@pytest.mark.parametrize("kind", MANY)
async def test_a_body_of_too_many_values_is_not_parsed(
    kind: str,
    gateway: Gateway,
    policy: Upstream,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few bytes each, they become a hundred in memory."""
    monkeypatch.setattr(codec, "MAX_VALUES", 1_000_000)
    route = gateway.open(policy.endpoint())
    body = io.BytesIO(b'{"x":' + MANY[kind] + b"}")
    async with http.post(f"{route.base_url}/chat/completions", data=body) as response:
        assert response.status == 413
        assert "values" in (await response.json())["error"]["message"]
    assert not policy.seen


@pytest.mark.parametrize("depth", [100, 1000, 5000, 100_000])
async def test_a_deep_body_fails_alone(
    depth: int, gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    route = gateway.open(policy.endpoint())
    deep = b"[" * depth + b"]" * depth
    url = f"{route.base_url}/chat/completions"
    async with http.post(url, data=PLAIN[:-1] + b', "x": ' + deep + b"}") as response:
        assert response.status == (200 if depth == 100 else 400)
        assert (await response.json()) is not None
    async with http.post(url, json=BODY) as response:
        assert response.status == 200


def answering(content: bytes, **headers: str) -> Any:
    async def script(seen: Seen) -> web.StreamResponse:
        return web.Response(body=content, content_type="application/json", headers=headers)

    return script


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_policys_answer_has_an_end(
    chunked: bool, gateway: Gateway, http: aiohttp.ClientSession, small: int
) -> None:
    async def script(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={} if chunked else {"Content-Length": str(1 << 40)})
        await response.prepare(seen.request)
        while True:
            await response.write(b" " * 65536)

    async with upstream(script) as endless:
        route = gateway.open(endless.endpoint())
        async with http.post(f"{route.base_url}/chat/completions", json=BODY) as response:
            assert response.status == 502
    assert f"more than {small} bytes" in str(route.calls[0].error)
    assert len(endless.seen) == 1


ENCODED = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}


@pytest.mark.parametrize("encoding", ENCODED)
async def test_an_answer_compressed_unasked_is_understood(
    encoding: str, gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    content = ENCODED[encoding](json.dumps(chat_answer("packed")).encode())
    async with upstream(answering(content, **{"Content-Encoding": encoding})) as packing:
        assert packing.url
        route = gateway.open(packing.endpoint())
        async with http.post(f"{route.base_url}/chat/completions", json=BODY) as response:
            assert response.status == 200
            assert "Content-Encoding" not in response.headers
            assert (await response.json())["choices"][0]["message"]["content"] == "packed"
        assert "identity" in packing.seen[0].headers["Accept-Encoding"]


BAD = {
    "a bomb": (gzip.compress(b" " * 10_000_000), "gzip", "more than 100000 bytes"),
    "an unknown one": (b"x", "br", "Content-Encoding 'br'"),
    "one cut off": (gzip.compress(PLAIN)[:-12], "gzip", "gzip"),
    "none at all": (PLAIN, "gzip", "gzip"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_an_answer_that_cannot_be_inflated_is_an_error(
    kind: str, gateway: Gateway, http: aiohttp.ClientSession, small: int
) -> None:
    content, encoding, said = BAD[kind]
    async with upstream(answering(content, **{"Content-Encoding": encoding})) as bad:
        route = gateway.open(bad.endpoint())
        async with http.post(f"{route.base_url}/chat/completions", json=BODY) as response:
            assert response.status == 502
    assert said in str(route.calls[0].error)


async def test_an_answer_of_too_many_values_is_an_error(
    gateway: Gateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MAX_VALUES", 1_000_000)
    async with upstream(answering(b'{"choices":' + MANY["objects"] + b"}")) as swollen:
        route = gateway.open(swollen.endpoint())
        async with http.post(f"{route.base_url}/chat/completions", json=BODY) as response:
            assert response.status == 502
    assert "values" in str(route.calls[0].error)


async def test_inflating_an_answer_stops_at_the_limit(
    gateway: Gateway, http: aiohttp.ClientSession, small: int
) -> None:
    """100 KB that would become 100 MB take no more memory than is allowed, and what that costs while it is refused."""
    bomb = gzip.compress(bytes(100_000_000))

    async def script(seen: Seen) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async with upstream(script) as policy:
        url = f"{gateway.open(policy.endpoint()).base_url}/chat/completions"
        tracemalloc.start()
        try:
            async with http.post(url, json=BODY) as response:
                assert response.status == 502
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
        finally:
            tracemalloc.stop()
