"""An HTTP server that takes JSON and answers JSON: asked with retries, and whether it answers and for which models."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.addresses import without_login
from gymgate.core.errors import ConfigError, PolicyError
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
    Note,
    Retryable,
    is_quota_used_up,
    is_retried,
    retry_after_s,
    unnoted,
    with_retries,
)

PROBE_S = 10.0
"""Timeout of a question whether a server answers."""
CONTEXT_OVERFLOW = "context_length_exceeded"
"""`PolicyError.code` of a request that the model's context does not hold."""
_TAGS = re.compile(r"<(script|style)\b.*?</\1>|</?[a-z!][^<>]*>", re.IGNORECASE | re.DOTALL)
"""Tags of an HTML page, and what no reader sees: a page of a company's gateway says below them why it refuses."""
_OVERFLOW = re.compile(
    r"maximum context length is [\d,]+ tokens"  # vLLM, OpenAI, DeepSeek, OpenRouter
    r"|exceeds (the )?model's maximum context length"  # vLLM, SGLang
    r"|longer than the model's context length"  # SGLang
    r"|max_tokens must be at least 1, got -\d",  # vLLM, where the prompt leaves no room
    re.IGNORECASE,
)
_WORDS = 10_000
"""Characters of an error in which the words of an overflow are looked for."""
_SHORTEST_SECRET = 8
"""Characters. Shorter keys and headers are placeholders or words that messages need."""


class JSONAnswer(NamedTuple):
    """The answer to a request."""

    body: Any
    raw: bytes
    """The bytes of exactly this body."""
    status: int


@dataclass(eq=False, repr=False)
class JSONServer:
    """Sends `request` with a JSON body, again after a failure that another attempt may not have.

    `shown` is the server's name in messages; `secrets` of 8 characters or more are masked in them; `advice` adds to the
    message about a status that is no success. A rate limit (429) is waited out, for at most `rate_limit_s`.
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

    async def post(
        self, client: HTTPClient, payload: bytes, headers: Mapping[str, str], note: Note = unnoted
    ) -> JSONAnswer:
        """Return the answer to `payload`. Retries say so in a header, as the OpenAI SDK's do; see `Note` for `note`.

        Raises `PolicyError` for every failure, with the status code, where the server gave one.
        """
        attempt = functools.partial(self._attempt, client, payload, headers, note)
        response = await with_retries(attempt, self.max_retries, rate_limit_s=self.rate_limit_s)
        try:
            body, raw = codec.parse_bounded(response.body)
        except codec.TooLargeError as error:
            raise self.error(f"answered a body that {error}", response.status) from error
        except ValueError as error:
            raise self.error(f"answered {self._described(response, error)}", response.status) from error
        return JSONAnswer(body, raw, response.status)

    def error(self, what: str, status: int) -> PolicyError:
        """Make the error for an answer that cannot be used."""
        message = f"{self.shown} {self._masked(what)}"
        return PolicyError(message, endpoint=self.shown, status_code=status, retryable=False)

    def _masked(self, value: Any) -> Any:
        """Mask the secrets in the texts of a JSON value, before any is cut: half a secret would not be found."""
        if isinstance(value, dict):
            return {self._masked(key): self._masked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._masked(item) for item in value]
        if isinstance(value, str):
            for secret in self.secrets:
                if len(secret) >= _SHORTEST_SECRET:
                    value = value.replace(secret, "***")
        return value

    async def _attempt(
        self, client: HTTPClient, payload: bytes, headers: Mapping[str, str], note: Note, retries: int
    ) -> Response:
        note(retries)
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
        raise self._refused(response)

    def _refused(self, response: Response) -> Exception:
        status = response.status
        body, reason = self.reason(response)
        used_up = is_quota_used_up(status, body)
        advice = " (the quota is used up)" if used_up else self.advice(response)
        failure = self.error(f"answered HTTP {status}{advice}: {reason}", status)
        failure.code, failure.param = _code_and_param(body, response)
        self.rate_limit = failure if status == RATE_LIMITED else None
        if is_retried(status, response.headers) and not used_up:
            failure.retryable = True
            failure.retry_after_s = retry_after_s(response.headers)
            return Retryable(failure)
        return failure

    def reason(self, response: Response) -> tuple[Any, str]:
        """Return the body of a refusal, `None` if it cannot be read, and its message on one line; secrets are masked in both."""
        try:
            body = self._masked(codec.parse_bounded(response.body)[0]) if response.body else "nothing"
        except codec.TooLargeError as error:
            return None, f"a body that {error}"
        except ValueError as error:
            return None, self._described(response, error)
        return body, error_text(body)

    def _described(self, response: Response, error: ValueError) -> str:
        """A body that cannot be read: why, or what kind of text it is and how it begins."""
        if "nested" in str(error):
            return f"JSON {error}"
        kind = response.headers.get("content-type", "no content type").partition(";")[0]
        text = self._masked(response.body.decode(errors="replace"))[:4000]
        start = shortened(_TAGS.sub(" ", text), 200) or shortened(text, 200)
        return f"{kind} that is not JSON: {start!r}" if response.body else f"an empty body ({kind})"


async def probe(url: str, client: HTTPClient, headers: Mapping[str, str] | None = None) -> Response | str:
    """Return the answer to a GET, or why the URL is not ready to be used: it does not answer, or with a status of 5xx.

    Raises `ConfigError` where this machine's settings keep it from being reached, such as those of certificates and proxies.
    """
    try:
        response = await client.send(Request(url, headers, method="GET"), timeout_s=PROBE_S)
    except TimeoutError:
        return f"no answer within {PROBE_S:g} s"
    except (HTTPFailure, ValueError) as error:
        if isinstance(error, UnreachableError) and not error.retryable:
            raise ConfigError(f"{without_login(url)}: {error}") from error
        return str(error)
    return f"status {response.status}" if response.status >= 500 else response


def object_of(answer: Response) -> dict[str, Any]:
    """Return the JSON object that an answer holds. Raises `ValueError`."""
    value, _ = codec.parse_bounded(answer.body)
    if not isinstance(value, dict):
        raise ValueError(f"not an object but {type(value).__name__}")
    return value


def listed_models(answer: Response) -> list[dict[str, Any]] | None:
    """Return the models that an answer to the request for `/models` lists, or `None` if the answer is not a model list."""
    if answer.status != 200:
        return None
    try:
        models = object_of(answer)["data"]
        return models if all(isinstance(model["id"], str) for model in models) else None
    except (ValueError, KeyError, TypeError):
        return None


def error_text(body: Any) -> str:
    """Find the message in an error body, however its server nests it; return it on one short line."""
    message = message_in(body)
    return shortened(message if message is not None else codec.dumps(body).decode(errors="replace"))


def is_context_overflow(code: str | None, text: str) -> bool:
    """Whether the error of a 400 says, by its code or in an endpoint's own words, that the context is too short."""
    return code == CONTEXT_OVERFLOW or _OVERFLOW.search(text) is not None


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


def _code_and_param(body: Any, response: Response) -> tuple[str | None, str | None]:
    """Return the `code` and `param` of an error body."""
    error = body.get("error") if isinstance(body, dict) else None
    fields = error if isinstance(error, dict) else body if isinstance(body, dict) else {}
    code, param = (
        value if isinstance(value := fields.get(name), str) else None for name in ("code", "param")
    )
    text = message_in(body) or response.body[:_WORDS].decode(errors="replace")
    overflows = response.status == 400 and is_context_overflow(code, text[:_WORDS])
    return CONTEXT_OVERFLOW if overflows else code, param
