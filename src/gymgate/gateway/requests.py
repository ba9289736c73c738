"""A request to the gateway: its question, and the rollout that it belongs to.

    /ng-rollout/<key>[/training-token-capture]/v1/<operation>     key in the URL, where NeMo Gym puts it
    /v1/<operation>, /<operation>                                  key as bearer token, as x-api-key, or in metadata

`v1` may be missing or doubled: SDKs differ in what they add to a base URL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.gateway.dialects.reading import without

METADATA_KEY = "gymgate_route"
"""Entry of a request's `metadata` with the rollout's key, or a base URL that holds it, where the URL cannot carry it."""

DIALECTS: Mapping[str, Dialect] = {
    "responses": "responses",
    "chat/completions": "chat",
    "messages": "messages",
}
REFUSED: Mapping[str, Dialect] = {"tokenize": "chat", "messages/count_tokens": "messages"}
"""Operations that need a tokenizer, which the gateway does not have."""

_PREFIX = "/ng-rollout/"
_CAPTURE = "training-token-capture/"
_KEY = re.compile(r"[0-9a-f]{32}")
"""A key; NeMo Gym appends the attempt to the rollout id."""


class RequestPath(NamedTuple):
    """The parts of a request's path."""

    key: str | None
    operation: str

    @property
    def dialect(self) -> Dialect:
        """The dialect to answer in, errors included."""
        return DIALECTS.get(self.operation) or REFUSED.get(self.operation) or "chat"


class Refusal(Exception):
    """A request that is answered with an error and reaches no endpoint."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def parse_path(raw_path: str) -> RequestPath:
    """Split a request's path, with or without a query."""
    path = raw_path.partition("?")[0]
    key = None
    if path.startswith(_PREFIX):
        key, _, path = path[len(_PREFIX) :].partition("/")
        path = path.removeprefix(_CAPTURE)
    path = path.strip("/")
    while path.startswith("v1/"):  # twice, where an SDK adds its own to a base URL that ends with it
        path = path[3:]
    return RequestPath(key, path)


def key_of_headers(headers: Mapping[str, str]) -> str | None:
    """Return the bearer token or API key; `None` if it cannot be a rollout's key (agents send placeholders)."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and looks_like_key(token.strip()):
        return token.strip()
    token = headers.get("x-api-key", "")
    return token if looks_like_key(token) else None


def looks_like_key(token: str) -> bool:
    return _KEY.fullmatch(token) is not None


def check_encoding(headers: Mapping[str, str]) -> None:
    """Refuse a compressed body: its size is unknown before it is inflated."""
    encoding = headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise Refusal(415, f"the request's body has Content-Encoding {encoding[:50]!r}; send it uncompressed")


def parse_body(raw: bytes, parse: Callable[[bytes], tuple[Any, bytes]]) -> tuple[dict[str, Any], bytes]:
    """Parse a request's body; return the object and the bytes to pass on. `Refusal` for anything but a JSON object."""
    try:
        body, raw = parse(raw)
    except codec.TooLargeError as error:
        raise Refusal(413, f"the request's body {error}") from error
    except ValueError as error:
        raise Refusal(400, f"the request's body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"the request's body is a JSON {type(body).__name__}, not an object")
    return body, raw


def take_routing_entry(body: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the body without our entry in its metadata, and the key in that entry.

    Metadata left empty is removed. The same `body` object comes back if there is no entry.
    """
    metadata = body.get("metadata")
    if not isinstance(metadata, dict) or METADATA_KEY not in metadata:
        return body, None
    key = metadata[METADATA_KEY]
    rest = without(metadata, METADATA_KEY)
    stripped = {**body, "metadata": rest} if rest else without(body, "metadata")
    return stripped, key.partition(_PREFIX)[2].partition("/")[0] or key if isinstance(key, str) else None
