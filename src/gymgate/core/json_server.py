"""An HTTP server that takes JSON and answers JSON: asked with retries, and whether it answers and for which models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.errors import PolicyError
from gymgate.core.http_client import (
    HTTPClient,
    HTTPFailure,
    Request,
    Response,
    UnreachableError,
    UnusableBodyError,
    header_lines,
)
from gymgate.core.retrying import (
    RATE_LIMITED,
    Retryable,
    is_quota_used_up,
    is_retried,
    retry_after_s,
    with_retries,
)

PROBE_S = 10.0
"""Timeout of a question whether a server answers."""


class JSONAnswer(NamedTuple):
    """The answer to a request."""

    body: Any
    raw: bytes
    """The bytes of exactly this body."""
    status: int
    retries: int


@dataclass(eq=False, repr=False)
class JSONServer:
    """Sends `request` with a JSON body, again after a failure that another attempt may not have.

    `shown` is the server's name in messages; `secrets` are masked in them; `advice` adds to the message about a status that
    is no success. A rate limit (429) is waited out, for at most `rate_limit_s`.
    """

    request: Request
    shown: str
    _: KW_ONLY
    timeout_s: float
    max_retries: int
    rate_limit_s: float = math.inf
    secrets: Sequence[str] = ()
    advice: Callable[[Response], str] = lambda response: ""
    rate_limit: PolicyError | None = None
    """The last answer of all, if it was a 429."""

    async def post(self, client: HTTPClient, payload: bytes, headers: Mapping[str, str]) -> JSONAnswer:
        """Return the answer to `payload`. Retries say so in a header, as the OpenAI SDK's do.

        Raises `PolicyError` for every failure, with the status code, where the server gave one.
        """
        attempt = functools.partial(self._attempt, client, payload, headers)
        response, retries = await with_retries(attempt, self.max_retries, rate_limit_s=self.rate_limit_s)
        try:
            body, raw = codec.parse_bounded(response.body)
        except codec.TooLargeError as error:
            raise self.error(f"answered a body that {error}", response.status) from error
        except ValueError as error:
            described = _described(self._without_secrets(response), error)
            raise self.error(f"answered {described}", response.status) from error
        return JSONAnswer(body, raw, response.status, retries)

    def error(self, what: str, status: int) -> PolicyError:
        """Make the error for an answer that cannot be used."""
        for secret in self.secrets:
            what = what.replace(secret, "***")
        return PolicyError(f"{self.shown} {what}", endpoint=self.shown, status_code=status, retryable=False)

    def _without_secrets(self, response: Response) -> Response:
        """Mask the secrets in a body that will be cut for a message: half a secret would not be found."""
        body = response.body
        for secret in self.secrets:
            body = body.replace(secret.encode(), b"***")
        return response._replace(body=body)

    async def _attempt(
        self, client: HTTPClient, payload: bytes, headers: Mapping[str, str], retries: int
    ) -> Response:
        lines = header_lines({**headers, "x-stainless-retry-count": str(retries)} if retries else headers)
        try:
            response = await client.send(self.request, payload, headers=lines, timeout_s=self.timeout_s)
        except TimeoutError as error:
            message = f"{self.shown}: no answer in {self.timeout_s:g} s"
            raise PolicyError(message, endpoint=self.shown, retryable=False) from error
        except UnusableBodyError as error:
            raise self.error(f"answered a body that {error}", error.status) from error
        except UnreachableError as error:
            message = f"cannot connect to {self.shown}: {shortened(str(error))}"
            failure = PolicyError(message, endpoint=self.shown, retryable=True)
            raise (Retryable(failure) if error.retryable else failure) from error
        except HTTPFailure as error:
            message = f"{self.shown} dropped the connection: {shortened(str(error))}"
            raise Retryable(PolicyError(message, endpoint=self.shown, retryable=True)) from error
        if 200 <= response.status < 300:
            self.rate_limit = None
            return response
        raise self._refused(self._without_secrets(response))

    def _refused(self, response: Response) -> Exception:
        status = response.status
        body = None
        try:
            body = codec.parse_bounded(response.body)[0] if response.body else "nothing"
            reason = error_text(body)
        except codec.TooLargeError as error:
            reason = f"a body that {error}"
        except ValueError as error:
            reason = _described(response, error)
        used_up = is_quota_used_up(status, body)
        advice = " (the quota is used up)" if used_up else self.advice(response)
        failure = self.error(f"answered HTTP {status}{advice}: {reason}", status)
        self.rate_limit = failure if status == RATE_LIMITED else None
        if is_retried(status, response.headers) and not used_up:
            failure.retryable = True
            failure.retry_after_s = retry_after_s(response.headers)
            return Retryable(failure)
        return failure


async def probe(url: str, client: HTTPClient, headers: Mapping[str, str] | None = None) -> Response | str:
    """Return the answer to a GET, or why the URL is not ready to be used: it does not answer, or with a status of 5xx."""
    try:
        response = await client.send(Request(url, headers, method="GET"), timeout_s=PROBE_S)
    except TimeoutError:
        return f"no answer within {PROBE_S:g} s"
    except (HTTPFailure, ValueError) as error:
        return str(error)
    return f"status {response.status}" if response.status >= 500 else response


def listed_models(answer: Response) -> list[dict[str, Any]] | None:
    """Return the models that an answer to the request for `/models` lists; `None` if it is no such list."""
    if answer.status != 200:
        return None
    try:
        models = codec.loads_object(answer.body)["data"]
        return models if all(isinstance(model["id"], str) for model in models) else None
    except (ValueError, KeyError, TypeError):
        return None


def error_text(body: Any) -> str:
    """Find the message in an error body, however its server nests it; return it on one short line."""
    message = message_in(body)
    return shortened(message if message is not None else codec.dumps(body).decode(errors="replace"))


def message_in(body: Any) -> str | None:
    """Return the message in an error body; `None` if there is none."""
    if isinstance(body, str):
        return body
    if not isinstance(body, dict):
        return None
    texts = (message_in(body.get(name)) for name in ("error", "message", "detail"))
    return next((text for text in texts if text is not None), None)


def shortened(text: str, longest: int = 300) -> str:
    """Return the text on one line of at most `longest` characters."""
    start = text[: 10 * longest]  # a split text takes thirty times its memory
    line = " ".join(start.split())
    return line if len(line) <= longest and start == text else line[: longest - 3] + "..."


def _described(response: Response, error: ValueError) -> str:
    """A body that cannot be read: why, or what kind of text it is and how it begins."""
    if "nested" in str(error):
        return f"JSON {error}"
    kind = response.headers.get("content-type", "no content type").partition(";")[0]
    start = shortened(response.body[:400].decode(errors="replace"), 80)
    return f"{kind} that is not JSON: {start!r}" if response.body else f"an empty body ({kind})"
