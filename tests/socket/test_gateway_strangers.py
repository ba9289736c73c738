"""Calls without a rollout's key: for processes of the stack's own user alone. A key opens its rollout for anybody who has it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest

from gymgate.gateway import handler, socket_owners
from gymgate.gateway.requests import METADATA_KEY
from gymgate.gateway.server import Gateway
from gymgate.gateway.socket_owners import user_of
from support.upstream import RawConnection, Upstream

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NOBODY = 65534
ASK = """
import encodings.idna, http.client, os, sys
uid, port, path, body, length = sys.argv[1:]
os.setuid(int(uid))
asking = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
asking.putrequest("POST", path)
asking.putheader("Content-Length", length)
asking.endheaders(body.encode())
print(asking.getresponse().status)
"""


@pytest.fixture
async def gateway(policy: Upstream) -> AsyncIterator[Gateway]:
    async with Gateway(judges={"judge": policy.endpoint()}) as running:
        yield running


async def ask(
    uid: int, port: int, path: str = "/v1/chat/completions", length: int | None = None, **fields: object
) -> int:
    """The status that a process of a user gets; it need not send as much as it says."""
    body = json.dumps({**BODY, **fields})
    words = [str(uid), str(port), path, body, str(length or len(body))]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", ASK, *words, stdout=asyncio.subprocess.PIPE
    )
    return int((await process.communicate())[0])


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@needs_root
async def test_another_user_gets_nothing_without_a_key(gateway: Gateway, policy: Upstream) -> None:
    """From a judge, from an agent process, by metadata; with a key as much as anybody."""
    judge, ports = await gateway.port_for("judge"), gateway.agent_ports()
    route = ports.route = gateway.open(policy.endpoint(), metadata_routing=True)
    port = await ports.port_for("policy_model")
    assert await ask(NOBODY, judge) == 401
    assert await ask(NOBODY, port) == 401
    assert await ask(NOBODY, gateway.port, metadata=route.metadata) == 401
    assert await ask(NOBODY, judge, path=f"/ng-rollout/{'0' * 32}/v1/chat/completions") == 404
    assert not policy.seen
    assert await ask(NOBODY, judge, path=f"/ng-rollout/{route.key}/v1/chat/completions") == 200
    for asked, fields in ((judge, {}), (port, {}), (gateway.port, {"metadata": route.metadata})):
        assert await ask(os.getuid(), asked, **fields) == 200


@needs_root
async def test_nothing_that_another_user_sends_is_read(gateway: Gateway) -> None:
    """The refusal comes although the body never does."""
    for path in ("/v1/chat/completions", f"/ng-rollout/{'0' * 32}/v1/chat/completions"):
        assert await ask(NOBODY, gateway.port, path=path, length=1_000_000) in (401, 404)


@pytest.mark.parametrize("owner", [NOBODY, None])
async def test_who_is_not_known_to_be_the_user_is_refused(
    owner: int | None, gateway: Gateway, policy: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = gateway.open(policy.endpoint(), metadata_routing=True)
    monkeypatch.setattr(handler, "user_of", lambda transport: owner)
    async with aiohttp.ClientSession() as http:
        for port in (gateway.port, await gateway.port_for("judge")):
            for what, body in (
                ("chat/completions", BODY),
                ("chat/completions", {"metadata": route.metadata}),
            ):
                async with http.post(f"http://127.0.0.1:{port}/v1/{what}", json=body) as response:
                    assert response.status == 401
                    assert f"user {os.getuid()}" in (await response.json())["error"]["message"]
            async with http.get(f"http://127.0.0.1:{port}/v1/models") as response:
                assert response.status == 401
        async with http.post(f"{route.base_url}/chat/completions", json=BODY) as response:
            assert response.status == 200
    assert METADATA_KEY not in policy.seen[0].body


@pytest.mark.parametrize("way", ["netlink", "proc"])
@pytest.mark.parametrize(
    ("host", "called"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.1", "::ffff:127.0.0.1")]
)
async def test_the_owner_of_a_connection_is_found(
    host: str, called: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either way; where the kernel answers no netlink, from its tables in /proc."""
    asked: list[str] = []
    by_proc = socket_owners._by_proc
    monkeypatch.setattr(socket_owners, "_by_proc", lambda *given: asked.append("proc") or by_proc(*given))
    if way == "proc":
        monkeypatch.setattr(socket_owners, "_NETLINK_SOCK_DIAG", 99)
    users: list[int | None] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        users.append(user_of(writer.transport))
        writer.close()
        users.append(user_of(writer.transport))

    async with await asyncio.start_server(connected, host, 0) as server:
        reader, writer = await asyncio.open_connection(called, server.sockets[0].getsockname()[1])
        assert await reader.read() == b""
        writer.close()
    assert users == [os.getuid(), None]
    assert asked == (["proc"] if way == "proc" else [])


async def test_a_key_that_dies_while_its_body_arrives_opens_nothing(
    gateway: Gateway, policy: Upstream
) -> None:
    """It was looked up before the body."""
    route = gateway.open(policy.endpoint())
    body = json.dumps(BODY).encode()
    connection = await RawConnection.open(gateway.port)
    head = [f"POST /ng-rollout/{route.key}/v1/chat/completions HTTP/1.1", "Host: g"]
    head += [f"Content-Length: {len(body)}", "Expect: 100-continue", "", ""]
    connection.writer.write("\r\n".join(head).encode())
    assert b" 100 " in await connection.reader.readuntil(b"\r\n\r\n")
    await route.close()
    connection.writer.write(body)
    assert (await connection.answer())[0] == 404
    assert (policy.seen, route.calls) == ([], [])
    await connection.drop()


@pytest.mark.parametrize("way", ["netlink", "proc"])
def test_a_socket_that_is_closed_has_no_owner(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel calls its user 0, which is root."""
    if way == "proc":
        monkeypatch.setattr(socket_owners, "_NETLINK_SOCK_DIAG", 99)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sending = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            transport = SimpleNamespace(get_extra_info=lambda name: accepted, is_closing=lambda: False)
            assert user_of(cast(asyncio.Transport, transport)) is not None
            sending.close()
            assert user_of(cast(asyncio.Transport, transport)) is None
