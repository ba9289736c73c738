"""Several replicas of one policy: a rollout stays with its replica, a new one goes to the least busy.

A replica that fails gets no calls during a cool-down, which grows. After it one call tries the replica, and a success brings it
back. A failed call goes to another replica, so that it costs its rollout one retry. Nothing probes replicas: TCP keepalive ends
the connections to a node that vanishes, which is a failure like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from gymgate.core.config import Dialect, HTTPEndpoint
from gymgate.core.errors import PolicyError
from gymgate.core.http_client import HTTPClient
from gymgate.core.retrying import BUSY, Note, Retryable, unnoted, with_retries
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.gateway.backends.http import HTTPBackend
from gymgate.gateway.dialects.usage import usage_of

WAIT_S = 300.0
"""Longest wait of a call for a replica, while all have a cool-down."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """One of the servers, with its health and load."""

    url: str
    in_flight: int = 0
    """Calls that have no answer yet."""
    served: int = 0
    output_tokens: int = 0
    failures: int = 0
    """Consecutive failures; 0 means healthy."""
    away_until: float = 0.0
    """The end of its cool-down (`time.monotonic`)."""

    def is_open(self, now: float) -> bool:
        """Whether it takes another call: it is healthy, or due for a trial, with one call at a time."""
        return now >= self.away_until and not (self.failures and self.in_flight)


class ReplicaPool:
    """Health and load of replicas, shared by every rollout that uses them; belongs to one event loop."""

    def __init__(self, urls: Sequence[str], client: HTTPClient, *, wait_s: float = WAIT_S) -> None:
        self.replicas = [Replica(url) for url in urls]
        self.client = client
        """For calls to the replicas."""
        self._wait_s = wait_s
        self._changed = asyncio.Event()

    async def pick(self, preferred: Replica | None) -> Replica:
        """Choose the preferred replica if it is open, else the least busy open one.

        Waits for one to open, up to a bound; then raises `PolicyError`.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            now = time.monotonic()
            open_ = [replica for replica in self.replicas if replica.is_open(now)]
            if preferred is not None and preferred in open_:
                return preferred
            if open_:
                # Of idle ones that which served least, or one replica would get every rollout that starts alone.
                return min(open_, key=lambda replica: (replica.in_flight, replica.served))
            if now >= deadline:
                raise self._none_left()
            # Nothing is awaited between looking and clearing, so no change is missed.
            cool_downs = [replica.away_until for replica in self.replicas if replica.away_until > now]
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min([deadline, *cool_downs]) - now):
                    await self._changed.wait()

    async def call(
        self,
        replica: Replica,
        backend: HTTPBackend,
        body: dict[str, Any],
        raw: bytes | None,
        session: str | None,
    ) -> BackendAnswer:
        """Make one call. Raises `PolicyError`, which may begin a cool-down of the replica."""
        replica.in_flight += 1
        try:
            answer = await backend.call(body, raw=raw, session=session)
        except PolicyError as error:
            self._note_failure(replica, error)
            raise
        finally:
            replica.in_flight -= 1
            self._changed.set()
        self._note_answer(replica)
        replica.served += 1
        answer.usage = usage_of(answer.body, backend.dialect)
        replica.output_tokens += answer.usage.output_tokens or 0
        answer.details = {**answer.details, "replica": replica.url}
        return answer

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return each replica's health, calls in flight, calls served and output tokens, by address."""
        return {
            replica.url: {
                "healthy": replica.failures == 0,
                "in_flight": replica.in_flight,
                "served": replica.served,
                "output_tokens": replica.output_tokens,
            }
            for replica in self.replicas
        }

    def _note_answer(self, replica: Replica) -> None:
        if replica.failures:
            logger.warning("replica %s is back", replica.url)
            replica.failures, replica.away_until = 0, 0.0

    def _note_failure(self, replica: Replica, error: PolicyError) -> None:
        """Begin a cool-down, unless the replica refused only this call. Calls that fail together count once."""
        now = time.monotonic()
        asks_for_time = error.retryable and error.status_code in BUSY
        failed = error.status_code is None or (error.retryable and not asks_for_time)
        if not failed:
            self._note_answer(replica)
        elif not replica.failures or now >= replica.away_until:
            replica.failures += 1
            logger.warning("replica %s gets no calls for a while: %s", replica.url, error.message)
        else:
            return
        if failed or asks_for_time:
            cool_down_s = Retryable(error).delay_s(max(replica.failures, 1))
            replica.away_until = max(replica.away_until, now + cool_down_s)

    def _none_left(self) -> PolicyError:
        urls = ", ".join(replica.url for replica in self.replicas)
        message = (
            f"none of {len(self.replicas)} replicas is healthy, after {self._wait_s:g} s of waiting: {urls}"
        )
        return PolicyError(message, endpoint=self.replicas[0].url, retryable=True)


class BalancedBackend:
    """One rollout's backend over a pool. The rollout stays with one replica, whose cache holds its conversation."""

    dialect: Dialect
    model: str | None
    is_endpoint = True

    def __init__(self, endpoint: HTTPEndpoint, pool: ReplicaPool, *, rate_limit_s: float = math.inf) -> None:
        self.dialect = endpoint.dialect
        self.model = endpoint.model
        self._endpoint = endpoint.resolved()
        self._pool = pool
        self._rate_limit_s = rate_limit_s
        self._shared: dict[Replica, HTTPBackend] = {}
        """One backend for each replica, of which each rollout gets a copy."""
        self._backends: dict[Replica, HTTPBackend] = {}
        self._replica: Replica | None = None

    def for_rollout(self) -> Self:
        """Return a backend for one rollout, which chooses a replica of its own; see `HTTPBackend.for_rollout`."""
        backend = copy.copy(self)
        backend._backends, backend._replica = {}, None
        return backend

    async def call(
        self,
        body: dict[str, Any],
        *,
        raw: bytes | None = None,
        session: str | None = None,
        note: Note = unnoted,
    ) -> BackendAnswer:
        """See `Backend.call`. Tries each replica, then again as `with_retries` does."""

        async def attempt(retries: int) -> BackendAnswer:
            self._replica = replica = await self._pool.pick(self._replica)
            try:
                note(retries)
                return await self._pool.call(replica, self._backend(replica), body, raw, session)
            except PolicyError as error:
                if not error.retryable:
                    raise
                # `pick` waits for a replica that asks for time.
                raise Retryable(error, waits=False) from error.__cause__

        others = len(self._pool.replicas) - 1
        return await with_retries(
            attempt, self._endpoint.max_retries, rate_limit_s=self._rate_limit_s, at_once=others
        )

    async def finish_sessions(self) -> None:
        """See `HTTPBackend.finish_sessions`."""
        await asyncio.gather(*(backend.finish_sessions() for backend in self._backends.values()))

    @property
    def rate_limit(self) -> PolicyError | None:
        """The failure that it waits out at this moment, if it does."""
        return next((backend.rate_limit for backend in self._backends.values() if backend.rate_limit), None)

    def _backend(self, replica: Replica) -> HTTPBackend:
        if replica not in self._shared:
            alone = {"base_url": replica.url, "replicas": (), "max_retries": 0}
            self._shared[replica] = HTTPBackend(self._endpoint.model_copy(update=alone), self._pool.client)
        if replica not in self._backends:
            self._backends[replica] = self._shared[replica].for_rollout()
        return self._backends[replica]
