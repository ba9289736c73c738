"""NeMo Gym's own client over connections that break: it sends again, unmarked, and each request stays one sample."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gymgate.gateway.server import Gateway
from gymgate.gym.runtime import clean_env, ensure_runtime
from support.stacks import runtime
from support.upstream import Seen, chat_answer, upstream

pytestmark = [pytest.mark.gym, pytest.mark.warm]

CLIENT = """
import asyncio, sys
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, request, set_global_aiohttp_client

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

async def main():
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    while url := (await asyncio.to_thread(sys.stdin.readline)).strip():
        response = await request("POST", url, json=BODY, headers={"Connection": "close"})
        print(response.status, (await response.json())["choices"][0]["message"]["content"], flush=True)

asyncio.run(main())
"""
MOMENTS = ("accepted", "in the request", "before the answer", "in the answer's head")


class Breaker:
    """Stands between a client and the gateway and breaks the next connection at a moment; later ones it leaves alone."""

    def __init__(self, gateway: Gateway, asked: asyncio.Event) -> None:
        self.port = 0
        self.broken: list[str] = []
        self.moment: str | None = None
        self._gateway = gateway
        self._asked = asked

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        moment, self.moment = self.moment, None
        back, there = await asyncio.open_connection("127.0.0.1", self._gateway.port)
        try:
            if moment is None:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pump(reader, there))
                    group.create_task(_pump(back, writer))
            else:
                await self._until(moment, reader, back, there)
                self.broken.append(moment)
        finally:
            there.transport.abort()
            writer.transport.abort()

    async def _until(
        self,
        moment: str,
        reader: asyncio.StreamReader,
        back: asyncio.StreamReader,
        there: asyncio.StreamWriter,
    ) -> None:
        if moment == "accepted":
            return
        request = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in request.split(b"\r\n") if b"ontent-Length" in line)
        there.write(request + await reader.readexactly(5))
        if moment == "in the request":
            await there.drain()
            return
        there.write(await reader.readexactly(length - 5))
        await self._asked.wait()
        if moment == "in the answer's head":
            await back.readexactly(10)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def gyms_client() -> AsyncIterator[asyncio.subprocess.Process]:
    python = (await asyncio.to_thread(ensure_runtime, runtime())).python
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-c", CLIENT),
        env=clean_env(()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_request_that_is_sent_again_is_one_sample() -> None:
    asked, count = asyncio.Event(), 0

    async def number(seen: Seen) -> web.Response:
        nonlocal count
        count += 1
        asked.set()
        # More than a connection's buffers hold: it is not fully written when it breaks.
        return web.json_response(chat_answer(f"{count}-") | {"padding": "x" * (16 << 20)})

    async with upstream(number) as policy, Gateway() as gateway, gyms_client() as client:
        route = gateway.open(policy.endpoint())
        breaker = Breaker(gateway, asked)
        server = await asyncio.start_server(breaker.connected, "127.0.0.1", 0, limit=1 << 10)
        async with server:
            url = route.base_url.replace(str(gateway.port), str(server.sockets[0].getsockname()[1]))
            assert client.stdin is not None
            assert client.stdout is not None
            for sample, moment in enumerate((*MOMENTS, None), start=1):
                asked.clear()
                breaker.moment = moment
                client.stdin.write(f"{url}/chat/completions\n".encode())
                said = (await asyncio.wait_for(client.stdout.readline(), 30)).decode().split()
                assert said == ["200", f"{sample}-"], moment
                assert (len(policy.seen), len(route.calls)) == (sample, sample), moment
        assert breaker.broken == list(MOMENTS)
    assert json.dumps(policy.seen[0].body) == json.dumps(policy.seen[-1].body)
