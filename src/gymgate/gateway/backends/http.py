"""An OpenAI-compatible server as a backend: overrides, credentials, retries, and one clear line per failure."""

from __future__ import annotations

import asyncio
import functools
import io
import itertools
import secrets
from typing import Any, NamedTuple
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import ClientTimeout, DummyCookieJar, TCPConnector
from multidict import CIMultiDict
from yarl import URL

from gymgate import codec
from gymgate.config import Dialect, HTTPEndpoint
from gymgate.errors import ConfigError, PolicyError
from gymgate.gateway.backends.answers import error_text, fault_of, shortened
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.gateway.bounds import TooLargeError, check_values, read_answer
from gymgate.retrying import Retryable, is_retried, retry_after_s

CONNECT_TIMEOUT_S = 30.0
_PATHS = {"chat": "chat/completions", "responses": "responses"}
_LARGE = 1 << 20
_SAME_MEANING = ({"max_tokens", "max_completion_tokens"},)
"""Body fields of which servers accept only one."""


def new_session() -> aiohttp.ClientSession:
    """A client session for model calls: no cookies, no limit on connections, no total timeout."""
    # Engines behind uvicorn close an idle connection after 5 s; reusing one for less avoids the race.
    connector = TCPConnector(limit=0, keepalive_timeout=4.0, ttl_dns_cache=300)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None),
        headers={"User-Agent": "gymgate", "Accept-Encoding": "identity", "Content-Type": "application/json"},
    )


class HTTPBackend:
    """Sends calls to one base URL. The session is shared; without one it makes, and closes, its own."""

    dialect: Dialect
    model: str | None

    def __init__(self, endpoint: HTTPEndpoint, session: aiohttp.ClientSession | None = None) -> None:
        endpoint = endpoint.resolved()
        self.dialect = endpoint.dialect
        self.model = endpoint.model
        self._endpoint = endpoint
        self._shown, self._url, self._proxy = _address(endpoint.base_url, endpoint.dialect)
        self._name = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._session = session
        self._owns_session = session is None
        self._key = endpoint.api_key.get_secret_value() if endpoint.api_key is not None else None
        self._headers = _headers(endpoint, self._key)
        self._sampling = dict(endpoint.sampling)
        self._dropped = _shadowed(self._sampling)
        # sock_connect bounds the dial alone: an engine may think for an hour, but not about accepting.
        self._timeout = ClientTimeout(
            total=endpoint.timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, endpoint.timeout_s)
        )

    def __repr__(self) -> str:
        return f"HTTPBackend({self._shown!r}, dialect={self.dialect!r}, model={self.model!r})"

    async def call(self, body: dict[str, Any], *, raw: bytes | None = None) -> BackendAnswer:
        """See `Backend.call`. Retries as the endpoint's `max_retries` says, with backoff."""
        payload = self._payload(body, raw)
        headers = self._headers.copy()
        # Lets an endpoint that keeps the calls it answered tell our retry from a new call.
        headers["Idempotency-Key"] = f"{self._name}-{next(self._numbers)}"
        retries = 0
        while True:
            try:
                answer = await self._attempt(payload, headers)
                answer.retries = retries
                return answer
            except Retryable as failure:
                if retries == self._endpoint.max_retries:
                    raise failure.error(retries) from failure.__cause__
                retries += 1
                headers["x-stainless-retry-count"] = str(retries)
                await asyncio.sleep(failure.delay_s(retries))

    async def close(self) -> None:
        """Close the session, if it is this backend's own."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    def _payload(self, body: dict[str, Any], raw: bytes | None) -> bytes:
        model = self.model if self.model is not None else body.get("model")
        if raw is not None and not self._sampling and model == body.get("model"):
            return raw
        changed = {name: value for name, value in body.items() if name not in self._dropped}
        if model is not None:
            changed["model"] = model
        return codec.dumps({**changed, **self._sampling})

    async def _attempt(self, payload: bytes, headers: CIMultiDict[str]) -> BackendAnswer:
        if self._session is None:
            self._session = new_session()
        # aiohttp warns about large bytes, and sends a file object in pieces.
        data: Any = payload if len(payload) < _LARGE else io.BytesIO(payload)
        try:
            async with self._session.post(
                self._url,
                data=data,
                headers=headers,
                timeout=self._timeout,
                proxy=self._proxy,
                allow_redirects=False,
                auto_decompress=False,
            ) as response:
                try:
                    content = await read_answer(response)
                except ValueError as error:
                    raise self._error(f"answered a body that {error}", response.status) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise Retryable(self._unreachable("no connection in time")) from error
        except TimeoutError as error:
            message = f"{self._shown}: no answer in {self._endpoint.timeout_s:g} s"
            raise PolicyError(message, endpoint=self._shown, retryable=False) from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._unreachable(shortened(str(error.certificate_error))) from error
        except aiohttp.ClientConnectorError as error:
            raise Retryable(self._unreachable(_reason(error.os_error))) from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"{self._shown} dropped the connection: {shortened(str(error)) or type(error).__name__}"
            raise Retryable(PolicyError(text, endpoint=self._shown, retryable=True)) from error
        if 200 <= response.status < 300:
            return self._answer(content, response)
        raise self._refused(content, response)

    def _answer(self, content: bytes, response: aiohttp.ClientResponse) -> BackendAnswer:
        try:
            check_values(content)
            body, content = codec.parse(content)
        except TooLargeError as error:
            raise self._error(f"answered a body that {error}", response.status) from error
        except ValueError as error:
            raise self._error(f"answered {_described(content, response, error)}", response.status) from error
        if (fault := fault_of(body, self.dialect)) is not None:
            raise self._error(fault, response.status)
        return BackendAnswer(body=body, raw=content)

    def _refused(self, content: bytes, response: aiohttp.ClientResponse) -> Exception:
        status = response.status
        try:
            said = error_text(codec.loads(content)) if content else "nothing"
        except ValueError as reason:
            said = _described(content, response, reason)
        error = self._error(f"answered HTTP {status}{self._advice(status, response)}: {said}", status)
        if is_retried(status):
            error.retryable = True
            error.retry_after_s = retry_after_s(response)
            return Retryable(error)
        return error

    def _advice(self, status: int, response: aiohttp.ClientResponse) -> str:
        if status in (401, 403):
            return f" ({self._credentials()})"
        if status == 404:
            model = f", model {self.model!r}" if self.model is not None else ""
            return f" (path {self._url.path}{model})"
        if 300 <= status < 400:
            return f" (redirects to {response.headers.get('Location')!r}; use that base_url)"
        return ""

    def _credentials(self) -> str:
        if self._endpoint.api_key_env is not None:
            return f"key from environment variable {self._endpoint.api_key_env!r}"
        return "key given as api_key" if self._key is not None else "no key was sent; set api_key_env"

    def _unreachable(self, reason: str) -> PolicyError:
        message = f"cannot connect to {self._shown}: {reason}"
        return PolicyError(message, endpoint=self._shown, retryable=True)

    def _error(self, what: str, status: int) -> PolicyError:
        if self._key:
            what = what.replace(self._key, "***")
        return PolicyError(f"{self._shown} {what}", endpoint=self._shown, status_code=status, retryable=False)


class _Address(NamedTuple):
    """Where calls go."""

    shown: str
    """The base URL as messages have it: without credentials."""
    url: URL
    proxy: URL | None


@functools.lru_cache(maxsize=256)
def _address(base_url: str, dialect: Dialect) -> _Address:
    """Every rollout has a backend, and most have the same address."""
    base = _base_url(base_url)
    return _Address(str(base.with_user(None)), base / _PATHS[dialect], proxy_for(base))


def _base_url(text: str) -> URL:
    try:
        url = URL(text.rstrip("/"))
    except ValueError as error:
        raise ConfigError(f"base_url {text!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url {text!r} must look like http://host:port/v1")
    return url


def _headers(endpoint: HTTPEndpoint, key: str | None) -> CIMultiDict[str]:
    headers = CIMultiDict(endpoint.headers)
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _shadowed(sampling: dict[str, Any]) -> frozenset[str]:
    """Fields of the caller's that an override in `sampling` replaces under another name."""
    return frozenset(name for names in _SAME_MEANING if names & sampling.keys() for name in names)


def proxy_for(url: URL) -> URL | None:
    """The proxy that the environment names for this URL; never for this machine itself."""
    host = url.host or ""
    if host in ("localhost", "::1") or host.startswith("127."):
        return None
    proxy = getproxies().get(url.scheme)
    return URL(proxy) if proxy and not proxy_bypass(host) else None


def _reason(error: OSError) -> str:
    return shortened(error.strerror or str(error) or type(error).__name__)


def _described(content: bytes, response: aiohttp.ClientResponse, error: ValueError) -> str:
    """A body that cannot be read: why, or what kind of text it is and how it begins."""
    if "nested" in str(error):
        return f"JSON {error}"
    start = shortened(content[:400].decode(errors="replace"), 80)
    kind = response.headers.get("Content-Type", "no content type").partition(";")[0]
    return f"{kind} that is not JSON: {start!r}" if content else f"an empty body ({kind})"
