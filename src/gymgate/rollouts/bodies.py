"""Requests of model calls, each kept as what it adds to an earlier one.

The requests of a conversation repeat: each holds the one before it and a little more. A `RequestLog` keeps only what each
adds, so that a rollout's record grows with the conversation and not with its square:

    request 0   {"model": "m", "input": [a]}         {"fields": {"model": {"value": "m"}, "input": {"value": [a]}}}
    request 1   {"model": "m", "input": [a, b]}      {"extends": 0, "fields": {"model": {}, "input": {"items": 1, "value": [b]}}}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from gymgate.core import codec

RECENT = 6
"""Requests that a new one is compared with, so that conversations that take turns find their own."""

Digest = bytes | list[bytes]
"""A digest of a field's value; of a list, one for each item."""


class _Seen(NamedTuple):
    position: int
    digests: dict[str, Digest]


class RequestLog:
    """Requests in the order of adding. Memory: the sum of what each adds, and digests of the `RECENT` last."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        """One JSON object for each request, as in the module's example."""
        self._recent: deque[_Seen] = deque(maxlen=RECENT)

    def add(self, body: Mapping[str, Any]) -> int:
        """Keep a request and return its position."""
        digests = {name: _digests(value) for name, value in body.items()}
        base, shared = None, 0
        for seen in reversed(self._recent):
            if (count := sum(_common(seen.digests, digests, name) for name in digests)) > shared:
                base, shared = seen, count
        entry: dict[str, Any] = {} if base is None else {"extends": base.position}
        entry["fields"] = {name: _addition(base, digests, name, value) for name, value in body.items()}
        self._recent.append(_Seen(len(self.entries), digests))
        self.entries.append(codec.dumps(entry))
        return len(self.entries) - 1


def read_requests(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests of a log's entries. Those of a conversation share the items that they have in common."""
    requests: list[dict[str, Any]] = []
    for entry in entries:
        base = requests[entry["extends"]] if "extends" in entry else {}
        request = {}
        for name, field in entry["fields"].items():
            if "items" in field:
                request[name] = [*base[name][: field["items"]], *field["value"]]
            else:
                request[name] = field["value"] if "value" in field else base[name]
        requests.append(request)
    return requests


def _digests(value: Any) -> Digest:
    return [_digest(item) for item in value] if isinstance(value, list) else _digest(value)


def _digest(value: Any) -> bytes:
    return blake2b(codec.dumps(value), digest_size=16).digest()


def _common(earlier: Mapping[str, Digest], later: Mapping[str, Digest], name: str) -> int:
    """Return how many items both lists of that name begin with; for other values, 1 if they are equal."""
    one, other = earlier.get(name), later[name]
    if not isinstance(one, list) or not isinstance(other, list):
        return int(one == other)
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def _addition(base: _Seen | None, digests: Mapping[str, Digest], name: str, value: Any) -> dict[str, Any]:
    """Return what a field adds to the base's field of that name."""
    if base is not None:
        if base.digests.get(name) == digests[name]:
            return {}
        if isinstance(value, list) and (count := _common(base.digests, digests, name)):
            return {"items": count, "value": value[count:]}
    return {"value": value}
