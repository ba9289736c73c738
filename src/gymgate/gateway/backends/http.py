"""An OpenAI-compatible server as a backend: overrides, credentials, and advice about its failures."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import itertools
import logging
import math
import secrets
from typing import Any, Self

from multidict import CIMultiDict
from yarl import URL

from gymgate.core import codec
from gymgate.core.addresses import basic_authorization, secrets_of_login
from gymgate.core.config import Dialect, HTTPEndpoint
from gymgate.core.errors import ConfigError, PolicyError
from gymgate.core.http_client import HTTPClient, HTTPFailure, Request, Response
from gymgate.core.json_server import JSONServer
from gymgate.core.retrying import Note, unnoted
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.gateway.dialects.content import joined_system
from gymgate.gateway.dialects.reading import fault_of, part_of, without

_PATHS = {"chat": "chat/completions", "responses": "responses"}
FORWARDED = "1.1 gymgate"
"""`Via` of each call (RFC 9110, section 7.6.3), by which a gateway knows calls of gateways, its own and those of other stacks."""
FINISH_TIMEOUT_S = 5.0
"""For a router to take note. Only the gateway's own end waits for that."""
_TEMPLATE_REFUSES = b"System message must be at the beginning"
"""What Qwen's chat templates say to a system message that is not the first."""
_SAME_MEANING = ({"max_tokens", "max_completion_tokens"},)
"""Body fields of which servers accept only one."""

logger = logging.getLogger(__name__)


class HTTPBackend:
    """Sends calls to one base URL, through a client that other backends share.

    A rate limit (429) is waited out, for at most `rate_limit_s`. Raises `ConfigError` for a key that is not set and a
    malformed URL.
    """

    dialect: Dialect
    model: str | None
    is_endpoint = True

    def __init__(self, endpoint: HTTPEndpoint, client: HTTPClient, *, rate_limit_s: float = math.inf) -> None:
        endpoint = endpoint.resolved()
        headers = request_headers(endpoint, endpoint.base_url)
        is_given = endpoint.session_header is not None and endpoint.session_header in headers
        self._session_header = None if is_given else endpoint.session_header
        try:
            request = _request(endpoint.base_url, endpoint.dialect, tuple(headers.items()))
            if self._session_header is not None:
                request.refuse_header(self._session_header)
        except ValueError as error:
            raise ConfigError(f"endpoint {endpoint.base_url!r}: {error}") from error
        self.dialect = endpoint.dialect
        self.model = endpoint.model
        self._endpoint = endpoint
        self._key = endpoint.api_key.get_secret_value() if endpoint.api_key is not None else None
        self._server = JSONServer(
            request,
            str(request.url).removesuffix(f"/{_PATHS[self.dialect]}"),
            timeout_s=endpoint.timeout_s,
            max_retries=endpoint.max_retries,
            rate_limit_s=rate_limit_s,
            secrets=_secrets(endpoint),
            advice=self._advice,
        )
        self._sessions: set[str] = set()
        """Those of its calls that are not over."""
        self._name = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._client = client
        self._sampling = dict(endpoint.sampling)
        # Fields of the caller's that an override in `sampling` replaces under another name.
        self._dropped = {name for names in _SAME_MEANING if names & self._sampling.keys() for name in names}
        self._drops_strict = self.dialect == "chat" and not endpoint.strict_tools
        self._joins_system = endpoint.system_messages == "join"

    def for_rollout(self) -> Self:
        """Return a backend for one rollout, with its own sessions and rate limit; the rest it shares."""
        backend = copy.copy(self)
        backend._server = dataclasses.replace(self._server, rate_limit=None)
        backend._sessions = set()
        return backend

    def __repr__(self) -> str:
        return f"HTTPBackend({self._server.shown!r}, dialect={self.dialect!r}, model={self.model!r})"

    @property
    def rate_limit(self) -> PolicyError | None:
        """The failure that it waits out at this moment, if it does."""
        return self._server.rate_limit

    async def call(
        self,
        body: dict[str, Any],
        *,
        raw: bytes | None = None,
        session: str | None = None,
        note: Note = unnoted,
    ) -> BackendAnswer:
        """See `Backend.call`. Retries as the endpoint's `max_retries` says, with backoff."""
        # Lets an endpoint that keeps the calls it answered tell our retry from a new call.
        headers = {"Idempotency-Key": f"{self._name}-{next(self._numbers)}"}
        if session is not None and self._session_header is not None:
            headers[self._session_header] = session
            self._sessions.add(session)
        answer = await self._server.post(self._client, self._payload(body, raw), headers, note)
        if (fault := fault_of(answer.body, self.dialect)) is not None:
            raise self._server.error(fault, answer.status)
        return BackendAnswer(answer.body, answer.raw)

    def reason(self, response: Response) -> str:
        """Return the endpoint's own words in a refusal, on one line, without its secrets."""
        return self._server.reason(response)[1]

    async def finish_sessions(self) -> None:
        """Tell the router that the sessions so far are over, if it is to be told. A failure is logged."""
        sessions, self._sessions = self._sessions, set()
        if self._endpoint.finish_sessions:
            await asyncio.gather(*map(self._finish_session, sessions))

    async def _finish_session(self, session: str) -> None:
        url = URL(self._endpoint.base_url.rstrip("/").removesuffix("/v1")) / "finish_session"
        request = Request(
            url % {"session_id": session}, request_headers(self._endpoint, self._endpoint.base_url)
        )
        try:
            status = (await self._client.send(request, timeout_s=FINISH_TIMEOUT_S)).status
        except (HTTPFailure, TimeoutError) as error:
            logger.warning(
                "the end of a session did not reach %s: %s", self._server.shown, str(error) or "no answer"
            )
            return
        if status >= 400:
            logger.warning(
                "%s answered %d to the end of a session; finish_sessions is for routers that have /finish_session",
                self._server.shown,
                status,
            )

    def _payload(self, body: dict[str, Any], raw: bytes | None) -> bytes:
        model = self.model if self.model is not None else body.get("model")
        tools = _without_strict(body.get("tools")) if self._drops_strict else None
        messages = joined_system(body.get("messages")) if self._joins_system else None
        is_same = tools is None and messages is None
        if raw is not None and not self._sampling and model == body.get("model") and is_same:
            return raw
        changed = {name: value for name, value in body.items() if name not in self._dropped}
        if tools is not None:
            changed["tools"] = tools
        if messages is not None:
            changed["messages"] = messages
        if model is not None:
            changed["model"] = model
        return codec.dumps({**changed, **self._sampling})

    def _advice(self, response: Response) -> str:
        if response.status in (401, 403):
            return f" ({self._credentials()})"
        if response.status == 404:
            model = f", model {self.model!r}" if self.model is not None else ""
            return f" (path {self._server.request.url.path}{model})"
        if _TEMPLATE_REFUSES in response.body and not self._joins_system:
            return (
                " (the agent sends a system message after others; join them with --system-messages join, in Python "
                "system_messages='join')"
            )
        if 300 <= response.status < 400:
            return f" (redirects to {response.headers.get('location')!r}; use that base_url)"
        return ""

    def _credentials(self) -> str:
        if self._endpoint.api_key_env is not None:
            return f"key from environment variable {self._endpoint.api_key_env!r}"
        sent = "no key was sent" if self._key is None else "the key that was sent may be wrong"
        return (
            f"{sent}; give the policy's with --api-key-var, a judge's with --judge-key-var, in Python with "
            "api_key_env"
        )


def request_headers(endpoint: HTTPEndpoint, base_url: str) -> CIMultiDict[str]:
    """Return the headers of every request to a replica of an endpoint whose key has been read; a key wins over a login."""
    headers = CIMultiDict((name, value.get_secret_value()) for name, value in endpoint.headers)
    login = dict(endpoint.logins).get(base_url.rstrip("/"))
    if login is not None and "Authorization" not in headers:
        headers["Authorization"] = basic_authorization(login.get_secret_value())
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key.get_secret_value()}"
    return headers


def _secrets(endpoint: HTTPEndpoint) -> list[str]:
    """What an endpoint is told and nobody else: its key, headers and logins."""
    values = [endpoint.api_key, *(value for _, value in endpoint.headers)]
    logins = [secret for _, login in endpoint.logins for secret in secrets_of_login(login.get_secret_value())]
    return [*(value.get_secret_value() for value in values if value is not None), *logins]


@functools.lru_cache(maxsize=256)
def _request(base_url: str, dialect: Dialect, headers: tuple[tuple[str, str], ...]) -> Request:
    """Some rollouts have an endpoint to themselves, but the same request to send as others."""
    fields = CIMultiDict(headers)
    fields.add("Via", FORWARDED)
    return Request(URL(base_url.rstrip("/")) / _PATHS[dialect], fields)


def _without_strict(tools: Any) -> list[Any] | None:
    """Chat tools without `strict`; `None` if none has it."""
    if not isinstance(tools, list) or not any("strict" in part_of(tool, "function") for tool in tools):
        return None
    return [
        {**tool, "function": without(tool["function"], "strict")} if part_of(tool, "function") else tool
        for tool in tools
    ]
