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
from gymgate.rollouts.history import History

RECENT = 6
"""Requests that a new one is compared with, so that conversations that take turns find their own."""

Digest = bytes | list[bytes]
"""A digest of a field's value; of a list, one for each item."""


class _Seen(NamedTuple):
    position: int
    fields: dict[str, Digest | History]
    """By name. A `History` is digested only if it has to be compared with one that does not extend it."""


class RequestLog:
    """Requests in the order of adding. Memory: the sum of what each adds, and digests of the `RECENT` last."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        """One JSON object for each request, as in the module's example."""
        self._recent: deque[_Seen] = deque(maxlen=RECENT)

    def add(self, body: Mapping[str, Any]) -> int:
        """Keep a request and return its position."""
        fields = {
            name: value if isinstance(value, History) else _digests(value) for name, value in body.items()
        }
        base = self._extended(fields) or self._most_alike(fields)
        entry: dict[str, Any] = {} if base is None else {"extends": base.position}
        entry["fields"] = {
            name: _addition(value, fields[name], None if base is None else base.fields.get(name))
            for name, value in body.items()
        }
        self._recent.append(_Seen(len(self.entries), fields))
        self.entries.append(codec.dumps_to_keep(entry))
        return len(self.entries) - 1

    def _extended(self, fields: Mapping[str, Digest | History]) -> _Seen | None:
        """Return the recent request that this one is known to extend."""
        for seen in reversed(self._recent):
            for name, value in fields.items():
                if isinstance(value, History) and value.extends(seen.fields.get(name)):
                    return seen
        return None

    def _most_alike(self, fields: Mapping[str, Digest | History]) -> _Seen | None:
        base, shared = None, 0
        for seen in reversed(self._recent):  # of requests as much alike, the last one
            count = sum(_common(seen.fields.get(name), value) for name, value in fields.items())
            if count > shared:
                base, shared = seen, count
        return base


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
    if isinstance(value, History):
        value.digests = value.digests or [_digest(item) for item in value]
        return value.digests
    return [_digest(item) for item in value] if isinstance(value, list) else _digest(value)


def _digest(value: Any) -> bytes:
    return blake2b(codec.dumps(value), digest_size=16).digest()


def _common(earlier: Digest | History | None, later: Digest | History) -> int:
    """Return how many items both lists begin with; for other values, 1 if they are equal."""
    if isinstance(later, History) and later.extends(earlier):
        return later.shared
    if isinstance(earlier, list) and isinstance(later, list):
        one, other = (_digests(value) if isinstance(value, History) else value for value in (earlier, later))
        pairs = enumerate(zip(one, other, strict=False))
        return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))
    return int(earlier == later)


def _addition(value: Any, known: Digest | History, earlier: Digest | History | None) -> dict[str, Any]:
    """Return what a field adds to the `earlier` one of that name; `known` is the value's digest, if it is no `History`."""
    if not isinstance(known, list) or not isinstance(earlier, list):
        return {} if known == earlier else {"value": value}
    count = _common(earlier, known)
    if count == len(value) == len(earlier):
        return {}
    return {"items": count, "value": value[count:]} if count else {"value": value}
