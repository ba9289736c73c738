"""One model call while it is under way: its record so far, and what the gateway needs to answer it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gymgate.core import codec
from gymgate.core.errors import GymgateError
from gymgate.rollouts.record import ModelCall


@dataclass(slots=True, eq=False)
class Call:
    """One model call. `record` has everything but its bodies, which are kept as bytes until the rollout's record is made."""

    record: ModelCall
    request: int | None = None
    """Position in the route's `RequestLog`; `None` if bodies are not kept."""
    response: bytes | None = None
    upstream_request: int | None = None
    upstream_response: bytes | None = None
    failure: GymgateError | None = None
    """Why it failed, if it did: the endpoint (`PolicyError`), the request, or the gateway itself."""
    payload: bytes = b""
    """The bytes written to the agent: `response`, or the stream made of it. Dropped once nobody can ask for them again."""
    streamed: bool = False
    """Whether `payload` is a stream of server-sent events."""
    done: bool = False
    task: asyncio.Task[Any] | None = None
    """The task that performs the call, while it does."""
    connection: web.RequestHandler | None = None
    """The connection that waits for the answer, or that it was written to."""
    answer_id: str | None = None
    """The `id` that the endpoint gave its answer."""
    _done: asyncio.Event | None = None

    def note_retries(self, retries: int) -> None:
        """Note how often the gateway has repeated it so far."""
        if retries:
            self.record.details = {**self.record.details, "retries": retries}

    def finish(self) -> None:
        """Wake those who wait."""
        self.done = True
        self.task = None  # it holds the request and the response, and calls are kept
        if self._done is not None:
            self._done.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the call's end; return whether it came in time."""
        if self.done:
            return True
        if self._done is None:
            self._done = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            return False
        return True

    @property
    def failed(self) -> bool:
        """Whether the call ended without an answer."""
        return self.done and (self.record.status_code is None or self.record.status_code >= 400)

    @property
    def connection_lost(self) -> bool:
        transport = self.connection.transport if self.connection is not None else None
        return transport is None or transport.is_closing()

    def plain(self) -> dict[str, Any]:
        """Return the record for `codec.dumps`: requests as their positions in the log, answers as they are."""
        return {
            **self.record.__dict__,
            "usage": self.record.usage.__dict__,
            "request": self.request,
            "upstream_request": self.upstream_request,
            "response": self.response and codec.Verbatim(self.response),
            "upstream_response": self.upstream_response and codec.Verbatim(self.upstream_response),
        }
