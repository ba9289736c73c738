"""One rollout's entry in the gateway: its key, the endpoints of its calls, and their record."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gymgate.core import codec
from gymgate.core.config import POLICY, Dialect, RolloutLimits
from gymgate.core.errors import EnvironmentServerError, GymgateError, PolicyError, described
from gymgate.core.json_server import CONTEXT_OVERFLOW, is_context_overflow
from gymgate.core.retrying import BUSY
from gymgate.gateway.backends.base import Backend, BackendAnswer
from gymgate.gateway.call import Call
from gymgate.gateway.conversations import Conversations, session_id
from gymgate.gateway.dialects import (
    ConversationMemory,
    encode_stream,
    error_body,
    finish_reason_of,
    overflow_answer,
    token_data_of,
    translate_answer,
    translate_request,
    usage_of,
    with_text_ids,
)
from gymgate.gateway.dialects.reading import without
from gymgate.gateway.judging import JudgeCalls, KeylessJudgeCalls
from gymgate.gateway.repeats import RequestKey, RetryDeduplicator
from gymgate.gateway.requests import METADATA_KEY, Refusal
from gymgate.rollouts.history import RequestLog
from gymgate.rollouts.record import UNDELIVERED, Limit, ModelCall, read_calls

POLICY_AS_JUDGE = f"{POLICY}_as_judge"
"""The name by which resources servers know the policy's model server where a config makes the policy its own judge. Their
calls are not turns of the policy."""
CLOSE_TIMEOUT_S = 0.5
"""Wait for cancelled calls to end; a backend that cannot be cancelled goes on, and nothing of it is recorded."""
_KEYLESS_RESEND_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Target:
    """The backend of one model server, with the memory of the rollout's conversations there."""

    backend: Backend
    memory: ConversationMemory | None = field(default_factory=ConversationMemory)


class Route:
    """A rollout's calls, from `Gateway.open` to `close`; nothing is answered or recorded after that."""

    is_kept = True
    """Whether its calls are one rollout's, which end with it: they are recorded, and their conversations have ids."""
    _which_calls = ""

    def __init__(
        self,
        targets: Mapping[str, Target | None],
        *,
        base_url: str,
        rollout_id: str | None = None,
        limits: RolloutLimits | None = None,
        policy_servers: Collection[str] = (),
        callers: Mapping[str, str] | None = None,
        record_bodies: bool = True,
        metadata_routing: bool = False,
        on_close: Callable[[Route], None] = lambda route: None,
        on_end: Callable[[Route], None] = lambda route: None,
    ) -> None:
        """`on_close` is called when the key is to be retired, `on_end` once the calls have ended."""
        self.key = secrets.token_hex(16)
        """The secret that the rollout's calls carry; never logged."""
        self.rollout_id = rollout_id or secrets.token_hex(8)
        """The rollout's public name."""
        self.base_url = f"{base_url}/ng-rollout/{self.key}/v1"
        """The policy model's base URL for a client that takes one; any API key works with it."""
        self.metadata = {METADATA_KEY: self.key} if metadata_routing else {}
        """Entries to merge into a row's `responses_create_params.metadata`, for agents that lose the URL."""
        self.failure: GymgateError | None = None
        """The first failure of a call to the policy; those of judges are in `judges`."""
        self.truncated: Limit | None = None
        """The limit that ended the rollout, if one did."""
        self.judges = JudgeCalls()
        self.closed = False
        self.on_first_call: Callable[[], None] = lambda: None
        self._targets = dict(targets)
        self._policy_servers = frozenset({POLICY, *policy_servers})
        self._callers = callers or {}
        self._max_calls = limits.max_calls if limits is not None else None
        self._answers_overflow = limits is None or limits.context_overflow == "answer"
        self._record_bodies = record_bodies
        self._on_close = on_close
        self._on_end = on_end
        self._opened = time.monotonic()
        self.counts: Counter[str] = Counter()
        """The calls so far, by model server."""
        self.log: list[Call] = []
        """The calls so far, by arrival, judges' included."""
        self.requests = RequestLog()
        """The bodies that `log` refers to."""
        self._conversations: dict[str, Conversations] = {}
        """By model server."""
        self._policy_calls = 0
        self._overflowed_at = 0
        """The calls so far when a call exceeded the context last."""
        self._running: set[Call] = set()
        self.repeated = RetryDeduplicator()
        """The calls whose answers may be asked for again."""

    def __repr__(self) -> str:
        return f"Route({self.rollout_id!r}, {len(self.log)} calls{', closed' if self.closed else ''})"

    @property
    def calls(self) -> list[ModelCall]:
        """The calls so far as records; a call under way has no status."""
        return read_calls(codec.loads_own(codec.dumps(self.plain_calls())))

    def plain_calls(self) -> dict[str, Any]:
        """Return the calls so far for `codec.dumps`, and the requests that they refer to; see `record.read_calls`."""
        requests = [codec.Verbatim(entry) for entry in self.requests.entries]
        return {"calls": [call.plain() for call in self.log], "requests": requests}

    @property
    def in_flight(self) -> Counter[str]:
        """Calls that have no answer yet, by model server."""
        return Counter(call.record.model_server for call in self._running)

    @property
    def rate_limit(self) -> PolicyError | None:
        """The rate limit of an endpoint that a call waits out at this moment, if one does."""
        names = {call.record.model_server for call in self._running}
        errors = (
            getattr(target.backend, "rate_limit", None) for name in names if (target := self.target(name))
        )
        return next((error for error in errors if error is not None), None)

    async def close(self) -> None:
        """Retire the key and cancel what is in flight, upstream included. Idempotent."""
        self.closed = True  # first: what is answered from here on is not recorded
        self._on_close(self)
        self._conversations.clear()
        running = list(self._running)
        for call in running:
            if call.task is not None:
                call.task.cancel()
        # Bounded: a callable that runs in a thread cannot be cancelled.
        await asyncio.gather(*(call.wait(CLOSE_TIMEOUT_S) for call in running))
        self._on_end(self)

    def conversations(self, model_server: str) -> Conversations | None:
        """Return what is known of the conversations with a model server; `None` if nothing is kept."""
        return self._conversations.setdefault(model_server, Conversations()) if self.is_kept else None

    @property
    def backends(self) -> set[Backend]:
        """Everything that may have answered its calls."""
        return {target.backend for target in self._targets.values() if target is not None}

    def target(self, model_server: str) -> Target | None:
        """Return where calls to a model server go; `None` if it has no endpoint."""
        if model_server not in self._targets and model_server in self._policy_servers:
            return self._targets.get(POLICY)
        if model_server not in self._targets:
            default = self._targets.get("*")
            self._targets[model_server] = None if default is None else Target(default.backend)
        return self._targets.get(model_server)

    async def start(
        self, key: RequestKey, dialect: Dialect, body: dict[str, Any], connection: web.RequestHandler
    ) -> Call:
        """Make a new call and, unless it is streamed, wait for its end. It goes on if `connection` breaks.

        Raises `Refusal` if a limit forbids the call or its model server has no endpoint.
        """
        target = self._admit(key.model_server)
        is_policy = key.model_server in self._policy_servers
        record = ModelCall(
            index=self.counts.total(),
            model_server=POLICY if is_policy else key.model_server,
            agent=self._callers.get(key.model_server),
            dialect=dialect,
            started_s=time.monotonic() - self._opened,
        )
        if not self.counts:
            self.on_first_call()
        self.counts[record.model_server] += 1
        call = Call(record, connection=connection)
        if self.is_kept:
            self.log.append(call)
        call.streamed = body.get("stream") is True
        if self._record_bodies:
            call.request = self.requests.add(body)
        # Before anything is awaited: a repetition that arrives meanwhile finds the call.
        self._running.add(call)
        self.repeated.add(key, call)
        if call.record.model_server != POLICY:
            self.judges.note_start(key, call)
        performing = self._perform(call, target, body, key.body)
        if call.streamed:
            call.task = asyncio.create_task(performing)
        else:
            # In the request's own task: one task and two turns of the loop less for every call.
            call.task = asyncio.current_task()
            await performing
        return call

    def settle(self, key: RequestKey, call: Call, *, written: bool) -> None:
        """Note whether a call's answer was fully written to the connection that asked for it."""
        details = call.record.details
        if written:
            self.repeated.note_delivery(key, call)
            if UNDELIVERED in details:
                call.record.details = {name: value for name, value in details.items() if name != UNDELIVERED}
        elif call.record.status_code == 200:
            call.record.details = {**details, UNDELIVERED: call.answer_id}
        if call.record.model_server != POLICY:
            self.judges.note_end(key, call, written=written)

    def _admit(self, model_server: str) -> Target:
        target = self.target(model_server)
        if target is None:
            raise self.refuse(model_server)
        if model_server not in self._policy_servers:
            return target
        if self._max_calls is not None and self._policy_calls >= self._max_calls:
            self.truncated = "max_calls"
            raise Refusal(400, f"rollout limit: max_calls={self._max_calls}")
        self._policy_calls += 1
        return target

    def refuse(self, model_server: str) -> Refusal:
        """Note a call to a model server without an endpoint, and return the answer to it."""
        message = (
            f"model server {model_server!r} has no endpoint{self._which_calls}; give it one with --judge {model_server}=URL, "
            f'or in Python with models={{"{model_server}": ...}}'
        )
        error = PolicyError(message, status_code=404, retryable=False)
        if model_server not in self._policy_servers:
            self.judges.note_refusal(model_server, error)
        else:
            self.failure = self.failure or error
        return Refusal(404, message)

    async def _perform(self, call: Call, target: Target, body: dict[str, Any], raw: bytes) -> None:
        started = time.monotonic()
        try:
            await self._ask(call, target, body, raw)
        except asyncio.CancelledError:
            call.record.error = "cancelled: the rollout was released"
            if not self.closed or call.task is None:
                raise
            call.task.uncancel()  # the cancellation was meant for the call, not for the agent's request
        except PolicyError as error:
            self._fail(call, error, relayed_status(error))
        except GymgateError as error:
            message = f"the {call.record.dialect} call cannot be sent on: {error}"
            self._fail(call, EnvironmentServerError(message, status_code=400), 400)
        except Exception as error:
            logger.exception("rollout %s: model call %d failed", self.rollout_id, call.record.index)
            self._fail(call, GymgateError(f"internal error in the gateway: {described(error)}"), 502)
        finally:
            call.record.duration_s = time.monotonic() - started
            self._running.discard(call)
            call.finish()  # last: whoever it wakes reads the record

    async def _ask(self, call: Call, target: Target, body: dict[str, Any], raw: bytes) -> None:
        backend, dialect = target.backend, call.record.dialect
        upstream = translate_request(body, dialect, backend.dialect, target.memory)
        if upstream.get("stream") is True:  # endpoints answer whole
            upstream = without(upstream, "stream", "stream_options")
        try:
            session = session_id(body, dialect, call.record.model_server, self.key) if self.is_kept else None
            as_sent = raw if upstream is body else None
            answer = await backend.call(upstream, raw=as_sent, session=session, note=call.note_retries)
        except PolicyError as error:
            answer = self._answer_to_overflow(call, backend, upstream, error)
        usage = answer.usage or usage_of(answer.body, backend.dialect)
        result = with_text_ids(answer.body, backend.dialect)
        result = translate_answer(result, body, backend.dialect, dialect, target.memory, usage=usage)
        if self.closed:  # a backend that cannot be cancelled; nothing is recorded any more
            return
        unchanged = answer.raw if result is answer.body else None
        response = codec.dumps_to_keep(result) if unchanged is None else unchanged
        if self._record_bodies:
            call.response = response
            if backend.dialect != dialect:
                call.upstream_request = self.requests.add(upstream)
                call.upstream_response = answer.raw or codec.dumps_to_keep(answer.body)
        if call.record.model_server == POLICY and "overflow" not in answer.details:
            self._note_recovery(call)
        call.record.usage = usage
        call.record.finish_reason = finish_reason_of(answer.body, backend.dialect)
        tokens = token_data_of(answer.body, backend.dialect)
        call.record.prompt_token_ids, call.record.completion_token_ids, call.record.logprobs = tokens
        call.record.details = {**answer.details, **call.record.details}
        call.answer_id = answer.body.get("id")
        call.payload = (
            b"".join(encode_stream(result, call.record.dialect, body)) if call.streamed else response
        )
        call.record.status_code = 200  # last: an answer that cannot be streamed is a failure

    def _answer_to_overflow(
        self, call: Call, backend: Backend, upstream: dict[str, Any], error: PolicyError
    ) -> BackendAnswer:
        """Return the answer to a policy call that exceeds the context, where NeMo Gym's vLLM model server gives one.

        Raises `error` for any other failure. A function or an SDK's own model has limits that its SDK counts.
        """
        is_endpoint = getattr(backend, "is_endpoint", False) and backend.dialect == "chat"
        is_answered = self._answers_overflow and call.record.model_server == POLICY and is_endpoint
        if not is_answered or error.status_code != 400 or error.code != CONTEXT_OVERFLOW:
            raise error
        self._note_overflow()
        logger.info("rollout %s: call %d: %s", self.rollout_id, call.record.index, error.message)
        return BackendAnswer(overflow_answer(upstream.get("model")), details={"overflow": error.message})

    def _note_overflow(self) -> None:
        self.truncated = "context_length"
        self._overflowed_at = self.counts.total()

    def _note_recovery(self, call: Call) -> None:
        """Forget an overflow if its agent goes on: this later call to the policy was answered, so no limit ended the rollout."""
        if self.truncated == "context_length" and call.record.index >= self._overflowed_at:
            self.truncated = None

    def _fail(self, call: Call, error: GymgateError, status: int) -> None:
        if self.closed:
            return
        if call.record.model_server != POLICY:
            error.message = f"model server {call.record.model_server!r}: {error.message}"
            error.args = (error.message,)
        call.streamed = False
        code, param = getattr(error, "code", None), getattr(error, "param", None)
        call.payload = codec.dumps(
            error_body(call.record.dialect, status, error.message, code=code, param=param)
        )
        call.response = call.payload if self._record_bodies else None
        call.record.error = error.message
        call.failure = error.with_traceback(None)  # whose frames would keep the bodies
        call.record.status_code = status
        if call.record.model_server == POLICY:
            self.failure = self.failure or error
            if status == 400 and isinstance(error, PolicyError) and is_context_overflow(code, error.message):
                self._note_overflow()
        logger.info("rollout %s: call %d: %s", self.rollout_id, call.record.index, error.message)


class KeylessRoute(Route):
    """Calls that carry no rollout's key, of many rollouts. They are recorded nowhere, and have no end."""

    is_kept = False
    _which_calls = " for calls without a rollout's key, as this one is"

    def __init__(self, targets: Mapping[str, Target | None]) -> None:
        super().__init__(targets, base_url="", rollout_id="keyless", record_bodies=False)
        self.judges: KeylessJudgeCalls = KeylessJudgeCalls()

    def settle(self, key: RequestKey, call: Call, *, written: bool) -> None:
        """Forget an answer that nobody came back for after a while, since no rollout ends here."""
        super().settle(key, call, written=written)
        if not written:
            asyncio.get_running_loop().call_later(_KEYLESS_RESEND_S, self.repeated.forget, key, call)


def relayed_status(error: PolicyError) -> int:
    """Return the status an agent gets: the endpoint's 4xx unless it asks for a retry, else 502, or 504 for a timeout.

    The gateway has retried by then, and an agent would retry again at the endpoint's own 429 or 503.
    """
    code = error.status_code
    if code is not None and 400 <= code < 500 and code not in BUSY:
        return code
    return 504 if code in (408, 504) or isinstance(error.__cause__, TimeoutError) else 502
