"""An OpenAI-compatible server as a backend: overrides, credentials, retries, and one clear line per failure."""

from __future__ import annotations

import functools
import itertools
import secrets
from typing import Any

from multidict import CIMultiDict
from yarl import URL

from gymgate import codec
from gymgate.config import Dialect, HTTPEndpoint
from gymgate.errors import ConfigError, PolicyError
from gymgate.gateway.backends.base import BackendAnswer, error_text, fault_of, shortened
from gymgate.http_client import (
    HTTPClient,
    HTTPFailure,
    Request,
    Response,
    UnreachableError,
    UnusableBodyError,
    header_lines,
)
from gymgate.retrying import Retryable, is_retried, retry_after_s, with_retries

_PATHS = {"chat": "chat/completions", "responses": "responses"}
_SAME_MEANING = ({"max_tokens", "max_completion_tokens"},)
"""Body fields of which servers accept only one."""


class HTTPBackend:
    """Sends calls to one base URL. The client is shared; without one it makes, and closes, its own."""

    dialect: Dialect
    model: str | None

    def __init__(self, endpoint: HTTPEndpoint, client: HTTPClient | None = None) -> None:
        endpoint = endpoint.resolved()
        self.dialect = endpoint.dialect
        self.model = endpoint.model
        self._endpoint = endpoint
        self._key = endpoint.api_key.get_secret_value() if endpoint.api_key is not None else None
        self._request = _request(endpoint, self._key)
        self._shown = str(_base_url(endpoint.base_url).with_user(None))
        """The base URL as messages have it: without credentials."""
        self._name = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._client = client if client is not None else HTTPClient()
        self._owns_client = client is None
        self._sampling = dict(endpoint.sampling)
        self._dropped = _shadowed(self._sampling)

    def __repr__(self) -> str:
        return f"HTTPBackend({self._shown!r}, dialect={self.dialect!r}, model={self.model!r})"

    async def call(self, body: dict[str, Any], *, raw: bytes | None = None) -> BackendAnswer:
        """See `Backend.call`. Retries as the endpoint's `max_retries` says, with backoff."""
        payload = self._payload(body, raw)
        # Lets an endpoint that keeps the calls it answered tell our retry from a new call.
        number = f"{self._name}-{next(self._numbers)}"

        async def attempt(retries: int) -> BackendAnswer:
            headers = {"Idempotency-Key": number}
            if retries:
                headers["x-stainless-retry-count"] = str(retries)
            return await self._attempt(payload, header_lines(headers))

        answer, retries = await with_retries(attempt, self._endpoint.max_retries)
        answer.retries = retries
        return answer

    async def close(self) -> None:
        """Close the client, if it is this backend's own."""
        if self._owns_client:
            await self._client.close()

    def _payload(self, body: dict[str, Any], raw: bytes | None) -> bytes:
        model = self.model if self.model is not None else body.get("model")
        if raw is not None and not self._sampling and model == body.get("model"):
            return raw
        changed = {name: value for name, value in body.items() if name not in self._dropped}
        if model is not None:
            changed["model"] = model
        return codec.dumps({**changed, **self._sampling})

    async def _attempt(self, payload: bytes, headers: bytes) -> BackendAnswer:
        try:
            response = await self._client.send(
                self._request, payload, headers=headers, timeout_s=self._endpoint.timeout_s
            )
        except TimeoutError as error:
            message = f"{self._shown}: no answer in {self._endpoint.timeout_s:g} s"
            raise PolicyError(message, endpoint=self._shown, retryable=False) from error
        except UnusableBodyError as error:
            raise self._error(f"answered a body that {error}", error.status) from error
        except UnreachableError as error:
            message = f"cannot connect to {self._shown}: {shortened(str(error))}"
            failure = PolicyError(message, endpoint=self._shown, retryable=True)
            raise (Retryable(failure) if error.retryable else failure) from error
        except HTTPFailure as error:
            message = f"{self._shown} dropped the connection: {shortened(str(error))}"
            raise Retryable(PolicyError(message, endpoint=self._shown, retryable=True)) from error
        if 200 <= response.status < 300:
            return self._answer(response)
        raise self._refused(response)

    def _answer(self, response: Response) -> BackendAnswer:
        try:
            body, raw = codec.parse_bounded(response.body)
        except codec.TooLargeError as error:
            raise self._error(f"answered a body that {error}", response.status) from error
        except ValueError as error:
            raise self._error(f"answered {_described(response, error)}", response.status) from error
        if (fault := fault_of(body, self.dialect)) is not None:
            raise self._error(fault, response.status)
        return BackendAnswer(body=body, raw=raw)

    def _refused(self, response: Response) -> Exception:
        status = response.status
        try:
            reason = error_text(codec.loads(response.body)) if response.body else "nothing"
        except ValueError as error:
            reason = _described(response, error)
        failure = self._error(f"answered HTTP {status}{self._advice(response)}: {reason}", status)
        if is_retried(status):
            failure.retryable = True
            failure.retry_after_s = retry_after_s(response.headers)
            return Retryable(failure)
        return failure

    def _advice(self, response: Response) -> str:
        if response.status in (401, 403):
            return f" ({self._credentials()})"
        if response.status == 404:
            model = f", model {self.model!r}" if self.model is not None else ""
            return f" (path {self._request.url.path}{model})"
        if 300 <= response.status < 400:
            return f" (redirects to {response.headers.get('location')!r}; use that base_url)"
        return ""

    def _credentials(self) -> str:
        if self._endpoint.api_key_env is not None:
            return f"key from environment variable {self._endpoint.api_key_env!r}"
        return "key given as api_key" if self._key is not None else "no key was sent; set api_key_env"

    def _error(self, what: str, status: int) -> PolicyError:
        if self._key:
            what = what.replace(self._key, "***")
        return PolicyError(f"{self._shown} {what}", endpoint=self._shown, status_code=status, retryable=False)


def _base_url(text: str) -> URL:
    try:
        url = URL(text.rstrip("/"))
    except ValueError as error:
        raise ConfigError(f"base_url {text!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url {text!r} must look like http://host:port/v1")
    return url


def _request(endpoint: HTTPEndpoint, key: str | None) -> Request:
    headers = CIMultiDict(endpoint.headers)
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        return _prepared(endpoint.base_url, endpoint.dialect, tuple(headers.items()))
    except ValueError as error:
        raise ConfigError(f"endpoint {endpoint.base_url!r}: {error}") from error


@functools.lru_cache(maxsize=256)
def _prepared(base_url: str, dialect: Dialect, headers: tuple[tuple[str, str], ...]) -> Request:
    """Every rollout has a backend, and most have the same request to send."""
    return Request(_base_url(base_url) / _PATHS[dialect], dict(headers))


def _shadowed(sampling: dict[str, Any]) -> frozenset[str]:
    """Fields of the caller's that an override in `sampling` replaces under another name."""
    return frozenset(name for names in _SAME_MEANING if names & sampling.keys() for name in names)


def _described(response: Response, error: ValueError) -> str:
    """A body that cannot be read: why, or what kind of text it is and how it begins."""
    if "nested" in str(error):
        return f"JSON {error}"
    kind = response.headers.get("content-type", "no content type").partition(";")[0]
    start = shortened(response.body[:400].decode(errors="replace"), 80)
    return f"{kind} that is not JSON: {start!r}" if response.body else f"an empty body ({kind})"
