"""Several replicas of one policy: a rollout stays with one while it is healthy, new ones go to the least busy.

A replica that fails is left out, for longer each time, and comes back when that time is over and one call to it
succeeds. A call whose replica dies or hangs goes to another one, so that it costs the rollout a retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gymgate.config import Dialect, HTTPEndpoint
from gymgate.errors import PolicyError
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.gateway.backends.http import HTTPBackend
from gymgate.gateway.dialects.usage import usage_of
from gymgate.http_client import HTTPClient, HTTPFailure, Request
from gymgate.retrying import BUSY, LONGEST_RETRY_AFTER_S, Retryable, with_retries

FIRST_ABSENCE_S = 1.0
LONGEST_ABSENCE_S = 30.0
WAIT_S = 300.0
"""Wait for any replica to come back, when none is healthy."""
SILENCE_S = 2.0
"""Probe a replica that has calls in flight and has answered nothing for this long."""
PROBE_S = 2.5
"""Timeout of one probe."""
PROBES = 2
"""Number of unanswered probes after which a replica counts as hanging."""
_POLL_S = 0.1

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """One of the servers, with its health and load."""

    url: str
    calls: set[asyncio.Task[BackendAnswer]] = field(default_factory=set)
    """In flight."""
    served: int = 0
    output_tokens: int = 0
    failures: int = 0
    """Consecutive failures; 0 means healthy."""
    away_until: float = 0.0
    """No calls before this time (`time.monotonic`): it failed, or it asked for time (`Retry-After`)."""
    unanswered: int = 0
    """Consecutive unanswered probes."""
    last_sign: float = 0.0
    """Time of its last answer of any kind (`time.monotonic`)."""

    def is_open(self, now: float) -> bool:
        """Whether it takes calls: it is healthy, or due for a trial, with one call at a time."""
        if now < self.away_until:
            return False
        return not self.calls if self.failures else self.unanswered == 0


class ReplicaPool:
    """Health and load of replicas, shared by every rollout that uses them; belongs to one event loop."""

    def __init__(self, urls: Sequence[str], client: HTTPClient, *, wait_s: float = WAIT_S) -> None:
        self.replicas = [Replica(url) for url in urls]
        self.client = client
        """For calls to the replicas."""
        self._wait_s = wait_s
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def pick(self, preferred: Replica | None, avoid: set[Replica]) -> Replica:
        """Choose the preferred replica if it is open, else the least busy open one; those in `avoid` come last.

        Waits for one to open, up to a bound; then raises `PolicyError`.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            now = time.monotonic()
            open_ = [replica for replica in self.replicas if replica.is_open(now)]
            fresh = [replica for replica in open_ if replica not in avoid]
            if preferred in fresh:
                assert preferred is not None
                return preferred
            if open_:
                return min(fresh or open_, key=lambda replica: (len(replica.calls), replica.served))
            if now >= deadline:
                raise self._none_left()
            await self._wait_for_change(min(self._next_return(now) - now, deadline - now))

    async def call(
        self, replica: Replica, backend: HTTPBackend, body: dict[str, Any], raw: bytes | None
    ) -> BackendAnswer:
        """Make one call. Raises `PolicyError`; a failure of the replica itself keeps further calls away from it."""
        if not replica.calls:
            replica.last_sign = time.monotonic()
        task = asyncio.create_task(backend.call(body, raw=raw))
        replica.calls.add(task)
        self._watch()
        try:
            answer = await task
        except asyncio.CancelledError:
            task.cancel()
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            message = f"{replica.url} hangs: it takes calls and answers nothing"
            raise PolicyError(message, endpoint=replica.url, retryable=True) from None
        except PolicyError as error:
            if error.retryable and error.status_code not in BUSY:
                self.leave_out(replica, error.message)
            else:
                self._seen(replica)
            wait_s = min(error.retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)
            replica.away_until = max(replica.away_until, time.monotonic() + wait_s)
            raise
        finally:
            replica.calls.discard(task)
            self._changed.set()
        self._seen(replica)
        replica.served += 1
        replica.output_tokens += usage_of(answer.body, backend.dialect).output_tokens or 0
        answer.details = {**answer.details, "replica": replica.url}
        return answer

    def leave_out(self, replica: Replica, why: str) -> None:
        """Keep calls away from a replica for a while; calls that fail together count once."""
        now = time.monotonic()
        if replica.failures and now < replica.away_until:
            return
        replica.failures += 1
        absence = min(FIRST_ABSENCE_S * 2.0 ** (replica.failures - 1), LONGEST_ABSENCE_S)
        replica.away_until = now + absence
        replica.unanswered = 0
        logger.warning("replica %s is left out for %g s: %s", replica.url, absence, why)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return each replica's health, calls in flight, calls served and output tokens, by address."""
        return {
            replica.url: {
                "healthy": replica.failures == 0 and replica.unanswered == 0,
                "in_flight": len(replica.calls),
                "served": replica.served,
                "output_tokens": replica.output_tokens,
            }
            for replica in self.replicas
        }

    async def close(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def _seen(self, replica: Replica) -> None:
        if replica.failures:
            logger.warning("replica %s is back", replica.url)
            replica.failures, replica.away_until = 0, 0.0
        replica.unanswered = 0
        replica.last_sign = time.monotonic()

    def _next_return(self, now: float) -> float:
        due = [replica.away_until for replica in self.replicas if replica.away_until > now]
        return min(due, default=now + _POLL_S)

    async def _wait_for_change(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._changed.wait()

    def _none_left(self) -> PolicyError:
        urls = ", ".join(replica.url for replica in self.replicas)
        message = (
            f"none of {len(self.replicas)} replicas is healthy, after {self._wait_s:g} s of waiting: {urls}"
        )
        return PolicyError(message, endpoint=self.replicas[0].url, retryable=True)

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch_for_hangs())

    async def _watch_for_hangs(self) -> None:
        """Probe silent replicas, and move the calls of hanging ones to others.

        Long generations are normal, so silence alone is no fault: a silent replica is asked for its models, and counts
        as hanging if it does not answer that twice.
        """
        while any(replica.calls for replica in self.replicas):
            suspected = any(replica.unanswered for replica in self.replicas)
            await asyncio.sleep(_POLL_S if suspected else SILENCE_S / 4)
            now = time.monotonic()
            silent = [r for r in self.replicas if r.calls and now - r.last_sign >= SILENCE_S]
            await asyncio.gather(*(self._probe(replica) for replica in silent))

    async def _probe(self, replica: Replica) -> None:
        if await self._answers(replica):
            replica.unanswered, replica.last_sign = 0, time.monotonic()
            return
        replica.unanswered += 1
        if replica.unanswered >= PROBES:
            self.leave_out(replica, f"no answer to {replica.unanswered} probes of {PROBE_S:g} s")
            for task in list(replica.calls):
                task.cancel()

    async def _answers(self, replica: Replica) -> bool:
        """Whether a replica answers `GET /models` at all; a refusal is an answer."""
        try:
            await self.client.send(Request(f"{replica.url}/models", method="GET"), timeout_s=PROBE_S)
        except (HTTPFailure, TimeoutError):
            return False
        return True


class BalancedBackend:
    """One rollout's backend over a pool. The rollout stays with one replica, whose cache holds its conversation."""

    dialect: Dialect
    model: str | None

    def __init__(self, endpoint: HTTPEndpoint, pool: ReplicaPool, *, rate_limit_s: float = math.inf) -> None:
        self.dialect = endpoint.dialect
        self.model = endpoint.model
        self._endpoint = endpoint.resolved()
        self._pool = pool
        self._rate_limit_s = rate_limit_s
        self._backends: dict[Replica, HTTPBackend] = {}
        self._replica: Replica | None = None

    async def call(self, body: dict[str, Any], *, raw: bytes | None = None) -> BackendAnswer:
        """See `Backend.call`. Tries each replica, then again as `with_retries` does."""
        failed: set[Replica] = set()

        async def attempt(retries: int) -> BackendAnswer:
            self._replica = replica = await self._pool.pick(self._replica, failed)
            try:
                return await self._pool.call(replica, self._backend(replica), body, raw)
            except PolicyError as error:
                if not error.retryable:
                    raise
                failed.add(replica)
                raise Retryable(
                    error, waits=False
                ) from error.__cause__  # `pick` waits for a replica that asks for time

        others = len(self._pool.replicas) - 1
        answer, retries = await with_retries(
            attempt, self._endpoint.max_retries, rate_limit_s=self._rate_limit_s, at_once=others
        )
        answer.retries = retries
        return answer

    @property
    def rate_limit(self) -> PolicyError | None:
        """The failure that it waits out at this moment, if it does."""
        return next((backend.rate_limit for backend in self._backends.values() if backend.rate_limit), None)

    def _backend(self, replica: Replica) -> HTTPBackend:
        if replica not in self._backends:
            alone = {"base_url": replica.url, "replicas": (), "max_retries": 0}
            self._backends[replica] = HTTPBackend(self._endpoint.model_copy(update=alone), self._pool.client)
        return self._backends[replica]
