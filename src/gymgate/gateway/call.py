"""One model call while it is under way, and the record made of it when somebody asks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

from gymgate.config import Dialect
from gymgate.errors import PolicyError
from gymgate.gateway.dialects import finish_reason_of, token_data_of, usage_of
from gymgate.rollout.bodies import BodyLog, BodyReader, RecordedBodies
from gymgate.rollout.record import ModelCall, Usage

Connection = web.RequestHandler


class Facts(NamedTuple):
    """What the record keeps of an answer beside its body."""

    usage: Usage
    finish_reason: str | None
    prompt_ids: list[int] | None
    completion_ids: list[int] | None
    logprobs: list[float] | None


NO_FACTS = Facts(Usage(), None, None, None, None)


def facts_of(answer: dict[str, Any], dialect: Dialect) -> Facts:
    """Usage, finish reason and token data of an answer in `dialect`."""
    prompt_ids, completion_ids, logprobs = token_data_of(answer, dialect)
    return Facts(
        usage_of(answer, dialect), finish_reason_of(answer, dialect), prompt_ids, completion_ids, logprobs
    )


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
    facts: Facts = NO_FACTS
    details: dict[str, Any] = field(default_factory=dict)
    status: int | None = None
    error: str | None = None
    failure: PolicyError | None = None
    """Why it failed, if the endpoint did."""
    duration_s: float = 0.0
    payload: bytes = b""
    """What is written to the agent: `response`, or the stream made of it. Dropped once nobody can ask for it again."""
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
        """Whether the call came to its end, in time."""
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
        """Finished with anything else than an answer."""
        return self.done and (self.status is None or self.status >= 400)

    @property
    def connection_lost(self) -> bool:
        transport = self.connection.transport if self.connection is not None else None
        return transport is None or transport.is_closing()

    def fields(self) -> dict[str, Any]:
        """The fields of a `ModelCall` beside its bodies."""
        facts = self.facts
        return {
            "index": self.index,
            "model_server": self.model_server,
            "dialect": self.dialect,
            "status_code": self.status,
            "error": self.error,
            "details": self.details,
            "usage": facts.usage,
            "prompt_token_ids": facts.prompt_ids,
            "completion_token_ids": facts.completion_ids,
            "logprobs": facts.logprobs,
            "started_s": self.started_s,
            "duration_s": self.duration_s,
            "finish_reason": facts.finish_reason,
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
