"""Replicas as processes that are killed, vanish and are started again under a gateway's rollouts."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from pathlib import Path

import aiohttp
import pytest
from pydantic import ValidationError

from gymgate.core import http_client
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import PolicyError
from gymgate.core.http_client import HTTPClient
from gymgate.gateway.backends import balance
from gymgate.gateway.backends.balance import BalancedBackend, ReplicaPool
from gymgate.gateway.server import Gateway
from support.upstream import Seen, chat_answer, upstream

PROGRAM = Path(__file__).with_name("replica_program.py")


class Ends(list[float]):
    """Times of answers; some can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.slowest = 0.0
        """Seconds that a call took at most."""
        self._more = asyncio.Event()

    def append(self, stamp: float) -> None:
        super().append(stamp)
        self._more.set()

    async def reached(self, count: int) -> None:
        while len(self) < count:
            self._more.clear()
            await self._more.wait()


class Server:
    """A replica's process."""

    def __init__(self, port: int = 0, latency_s: float = 0.02) -> None:
        tests = str(PROGRAM.parents[1])
        environment = {**os.environ, "PORT": str(port), "LATENCY_S": str(latency_s), "PYTHONPATH": tests}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True, env=environment
        )

    @cached_property
    def port(self) -> int:
        """Known once it listens."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def servers(count: int, latency_s: float = 0.02) -> Iterator[list[Server]]:
    started: list[Server] = []
    try:
        for _ in range(count):
            started.append(Server(latency_s=latency_s))
        assert all(server.port for server in started)
        yield started
    finally:
        for server in started:
            server.close()


def endpoint(replicas: list[Server]) -> HTTPEndpoint:
    first, *others = [server.url for server in replicas]
    return HTTPEndpoint(base_url=first, replicas=tuple(others), model="m")


async def rollout(
    gateway: Gateway, session: aiohttp.ClientSession, policy: HTTPEndpoint, turns: int, ended: Ends
) -> list[int]:
    """A rollout of so many calls; the pids that answered them. Nothing is retried on this side."""
    route = gateway.open(policy)
    pids = []
    try:
        for turn in range(turns):
            asked = time.monotonic()
            body = {"model": "x", "messages": [{"role": "user", "content": f"turn {turn}"}]}
            async with session.post(f"{route.base_url}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            pid, _, said = answer["choices"][0]["message"]["content"].partition(" ")
            assert said == f"turn {turn}"
            pids.append(int(pid))
            ended.append(time.monotonic())
            ended.slowest = max(ended.slowest, ended[-1] - asked)
    finally:
        await route.close()
    return pids


async def test_a_rollout_stays_with_a_replica_and_rollouts_are_spread() -> None:
    with servers(3) as replicas:
        async with Gateway() as gateway, aiohttp.ClientSession() as session:
            runs = [rollout(gateway, session, endpoint(replicas), 5, Ends()) for _ in range(30)]
            answered = await asyncio.gather(*runs)
    assert all(len(set(pids)) == 1 for pids in answered)
    spread = Counter(pids[0] for pids in answered)
    assert sorted(spread.values()) == [10, 10, 10]


async def test_one_dies_and_one_vanishes_and_no_rollout_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latency of the policy, not this machine, bounds the rate.

    Rollouts one after another in 30 places until, after two of three replicas went in the middle of it, the last one
    serves four fifths of the earlier rate. A node counts as vanished sooner than in earnest: after 5 s.
    """
    monkeypatch.setattr(http_client, "is_loopback", lambda host: False)
    monkeypatch.setattr(http_client, "VANISHED_S", 5)
    monkeypatch.setattr(http_client, "CONNECT_TIMEOUT_S", 2.0)
    ended, counts, before, gone, back = Ends(), [0, 0], 0.0, math.inf, math.inf
    with servers(3, latency_s=0.2) as replicas:
        async with Gateway() as gateway, aiohttp.ClientSession() as session:
            policy = endpoint(replicas)

            def recovered() -> bool:
                recent = sum(stamp > time.monotonic() - 1 for stamp in ended)
                return time.monotonic() > gone + 2 and recent >= 0.8 * before

            async def place() -> None:
                nonlocal back
                while back == math.inf and time.monotonic() < gone + 20:
                    counts[0] += 1
                    await rollout(gateway, session, policy, 5, ended)
                    counts[1] += 1
                    if recovered():
                        back = min(back, time.monotonic() - gone)

            started = time.monotonic()
            work = asyncio.gather(*(place() for _ in range(30)))
            await ended.reached(300)
            replicas[0].process.kill()
            os.kill(replicas[1].process.pid, signal.SIGUSR1)
            gone = time.monotonic()
            before = len(ended) / (gone - started)
            await work
    print(
        f"before {before:.0f}/s; back after {back:.1f} s; {counts[1]} rollouts, slowest call {ended.slowest:.1f} s"
    )
    assert counts[0] == counts[1]
    assert len(ended) == 5 * counts[1]
    assert ended.slowest > 1.5, "nothing vanished"
    assert back < 15
    assert ended.slowest < 15


async def test_a_replica_that_comes_back_is_used_again() -> None:
    with servers(2) as replicas:
        policy = endpoint(replicas)
        async with Gateway() as gateway, aiohttp.ClientSession() as session:
            port = replicas[1].port
            replicas[1].close()
            answered = await asyncio.gather(*(rollout(gateway, session, policy, 2, Ends()) for _ in range(8)))
            assert {pid for pids in answered for pid in pids} == {replicas[0].process.pid}
            replicas[1] = Server(port)
            async with asyncio.timeout(20):
                seen: set[int] = set()
                while len(seen) < 2:
                    runs = await asyncio.gather(
                        *(rollout(gateway, session, policy, 1, Ends()) for _ in range(8))
                    )
                    seen |= {pid for pids in runs for pid in pids}


@asynccontextmanager
async def pool_of(*urls: str, wait_s: float = balance.WAIT_S) -> AsyncIterator[ReplicaPool]:
    async with HTTPClient() as client:
        pool = ReplicaPool(urls, client, wait_s=wait_s)
        yield pool


async def test_waiting_for_a_replica_has_an_end() -> None:
    urls = ("http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1")
    body = {"model": "m", "messages": []}
    async with pool_of(*urls, wait_s=0.05) as pool:
        backend = BalancedBackend(HTTPEndpoint(base_url=urls[0], replicas=urls[1:], max_retries=0), pool)
        with pytest.raises(PolicyError) as refused:
            await backend.call(body)
        assert refused.value.endpoint == urls[1]
        with pytest.raises(PolicyError, match=r"0\.05 s") as waited:
            await backend.call(body)
        assert all(url in waited.value.message for url in urls)


async def test_a_refusal_is_not_taken_to_another_replica() -> None:
    async def refuse(seen: Seen) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"error": {"message": "too long"}}, status=400)

    async with upstream(refuse) as first, upstream() as second, pool_of(first.url, second.url) as pool:
        backend = BalancedBackend(HTTPEndpoint(base_url=first.url, replicas=(second.url,)), pool)
        with pytest.raises(PolicyError, match="too long"):
            await backend.call({"model": "m", "messages": []})
        assert not second.seen


async def test_a_busy_replica_hands_over_and_stays() -> None:
    async def busy(seen: Seen) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"error": {"message": "slow down"}}, status=429)

    async with upstream(busy) as first, upstream() as second, pool_of(first.url, second.url) as pool:
        backend = BalancedBackend(first.endpoint(replicas=(second.url,)), pool)
        noted: list[int] = []
        answer = await backend.call({"model": "m", "messages": []}, note=noted.append)
        assert answer.details["replica"] == second.url
        assert noted == [0, 1]
        assert [replica.failures for replica in pool.replicas] == [0, 0]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_replica_is_left_alone_for_as_long_as_it_asks(status: int) -> None:
    """Both ask for 1.5 s; the call waits for it and no replica is asked in between."""
    asked: list[float] = []
    noted: list[int] = []

    async def busy_at_first(seen: Seen) -> aiohttp.web.StreamResponse:
        asked.append(time.monotonic())
        if len(asked) > 2:
            return aiohttp.web.json_response(chat_answer())
        return aiohttp.web.json_response(
            {"error": {"message": "slow down"}}, status=status, headers={"Retry-After": "1.5"}
        )

    async with upstream(busy_at_first) as first, upstream(busy_at_first) as second:
        policy = first.endpoint(replicas=(second.url,), max_retries=1)
        async with pool_of(first.url, second.url) as pool:
            await BalancedBackend(policy, pool).call({"model": "m", "messages": []}, note=noted.append)
    assert noted == [0, 1, 2]
    assert len(asked) == 3
    assert asked[2] - asked[0] >= 1.5


async def test_calls_that_fail_together_count_once_and_one_call_tries_again() -> None:
    """Else a moment without network would leave all replicas alone for minutes, and then fall upon one of them."""
    gone = PolicyError("connection refused", retryable=True)
    async with pool_of("http://a/v1") as pool:
        (replica,) = pool.replicas
        for _ in range(5):
            pool._note_failure(replica, gone)
        assert replica.failures == 1
        assert replica.away_until - time.monotonic() <= 0.5
        assert not replica.is_open(time.monotonic())
        due = replica.away_until
        assert replica.is_open(due)
        replica.in_flight = 1
        assert not replica.is_open(due)


async def test_a_call_waits_while_other_calls_try_every_replica() -> None:
    async with pool_of("http://a/v1") as pool:
        (replica,) = pool.replicas
        replica.failures = replica.in_flight = 1
        picking = asyncio.create_task(pool.pick(None))
        await asyncio.sleep(0)
        assert not picking.done()
        replica.failures = replica.in_flight = 0
        pool._changed.set()
        assert await picking is replica


async def test_other_rollouts_spare_a_replica_that_asked_for_time() -> None:
    async def busy(seen: Seen) -> aiohttp.web.StreamResponse:
        return aiohttp.web.json_response({}, status=429, headers={"Retry-After": "3600"})

    async with upstream(busy) as first, upstream() as second, pool_of(first.url, second.url) as pool:
        policy = first.endpoint(replicas=(second.url,))
        for _ in range(5):
            await BalancedBackend(policy, pool).call({"model": "m", "messages": []})
        assert len(first.seen) == 1
        assert pool.describe()[first.url]["healthy"]


def test_an_address_given_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="replicas"):
        HTTPEndpoint(base_url="http://a/v1", replicas=("http://a/v1/",))
