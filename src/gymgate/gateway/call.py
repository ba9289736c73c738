"""One model call while it is under way, and the record made of it when somebody asks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gymgate.config import Dialect
from gymgate.errors import PolicyError
from gymgate.gateway.dialects import TokenData
from gymgate.rollout.bodies import BodyLog, BodyReader, RecordedBodies
from gymgate.rollout.record import ModelCall, Usage

Connection = web.RequestHandler


@dataclass(slots=True, eq=False)
class Call:
    """One model call. Bodies are kept as bytes, requests in the route's `BodyLog`."""

    index: int
    model_server: str
    dialect: Dialect
    started_s: float
    request: int | None = None
    """Position in the log of bodies; `None` if bodies are not kept."""
    response: bytes | None = None
    upstream_request: int | None = None
    upstream_response: bytes | None = None
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    tokens: TokenData = TokenData(None, None, None)  # noqa: RUF009
    details: dict[str, Any] = field(default_factory=dict)
    status: int | None = None
    error: str | None = None
    failure: PolicyError | None = None
    """The endpoint's failure, if it failed."""
    duration_s: float = 0.0
    payload: bytes = b""
    """The bytes written to the agent: `response`, or the stream made of it. Dropped once nobody can ask for them again."""
    streamed: bool = False
    """Whether `payload` is a stream of server-sent events."""
    done: bool = False
    task: asyncio.Task[Any] | None = None
    """The task that performs the call, while it does."""
    connection: Connection | None = None
    """The connection that waits for the answer, or that it was written to."""
    _done: asyncio.Event | None = None

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
        return self.done and (self.status is None or self.status >= 400)

    @property
    def connection_lost(self) -> bool:
        transport = self.connection.transport if self.connection is not None else None
        return transport is None or transport.is_closing()

    def fields(self) -> dict[str, Any]:
        """The fields of a `ModelCall` beside its bodies."""
        return {
            "index": self.index,
            "model_server": self.model_server,
            "dialect": self.dialect,
            "status_code": self.status,
            "error": self.error,
            "details": self.details,
            "usage": self.usage,
            "prompt_token_ids": self.tokens.prompt_ids,
            "completion_token_ids": self.tokens.completion_ids,
            "logprobs": self.tokens.logprobs,
            "started_s": self.started_s,
            "duration_s": self.duration_s,
            "finish_reason": self.finish_reason,
        }

    def record(self, requests: BodyLog) -> ModelCall:
        """The call as recorded so far, for this process; `requests` is its route's log."""
        return ModelCall.reading_from(
            RecordedBodies(
                BodyReader(requests.deltas),
                {"request": self.request, "upstream_request": self.upstream_request},
                {"response": self.response, "upstream_response": self.upstream_response},
            ),
            **self.fields(),
        )
