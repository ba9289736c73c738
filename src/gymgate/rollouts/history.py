"""The requests of a rollout's model calls: what each has in common with an earlier one.

An agent sends its whole history with every call. What is known of the items of an earlier request (their translation, their place
in the record) need not be found out again, if they are known to be the same. Equal is not enough: 1, 1.0 and true are.

    request 1   [a, b]               [a, b]
    request 2   [a, b, c, d]         [a, b] of request 1, and [c, d]

A `RequestLog` keeps only what each adds, so that a rollout's record grows with the conversation and not with its square:

    request 0   {"model": "m", "input": [a]}         {"fields": {"model": {"value": "m"}, "input": {"value": [a]}}}
    request 1   {"model": "m", "input": [a, b]}      {"extends": 0, "fields": {"model": {}, "input": {"items": 1, "value": [b]}}}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any, NamedTuple

from gymgate.core import codec

MARKS = 8
"""Places kept at which a translation may be continued: an agent may change the last items of its request in the next one."""
RECENT = 6
"""Requests that a new one is compared with, so that conversations that take turns find their own."""

Digest = bytes | list[bytes]
"""A digest of a field's value; of a list, one for each item."""


class Start(NamedTuple):
    """The first items of a conversation."""

    items: int
    digest: bytes


class History(list[Any]):
    """The items of one request. The first `shared` are those of an earlier request, `base`, the same objects; by default, all
    that it has.

    Nobody may change an item, nor the list.
    """

    __slots__ = ("_base", "_key", "digests", "known_translations", "marks", "shared", "start", "translations")

    start: Start | None
    """What the conversation begins with, once somebody has needed it."""

    def __init__(self, items: list[Any], base: History | None = None, shared: int | None = None) -> None:
        super().__init__(items)
        self.shared = shared if shared is not None else 0 if base is None else len(base)
        self.translations: dict[Hashable, History] = {}
        """What these items became, for the next request to begin with; by the form that they were translated to."""
        self.known_translations = {} if base is None else base.translations
        """What the base's items became."""
        self.marks: list[tuple[int, int]] = []
        """Of a translation: so many of the original's items became so many of these, whatever follows them."""
        start = None if base is None else base.start
        self.start = start if start is not None and start.items <= self.shared else None
        self.digests: list[bytes] | None = None
        """One for each item, once somebody has needed them."""
        # Not the base itself, which would keep that of its own, and so every request of the rollout.
        self._key = object()
        self._base = None if base is None else base._key

    def extends(self, other: object) -> bool:
        """Whether `other` is the earlier request that it shares items with."""
        return isinstance(other, History) and self._base is other._key


def translated(
    items: list[Any],
    form: Hashable,
    translate: Callable[[int, int], list[Any]],
    is_settled: Callable[[Any], bool] = lambda last: True,
    *,
    revised: int = 0,
) -> list[Any]:
    """Translate a request's items to `form`; those of an earlier request stay as they were translated then.

    `translate` translates the items from one position to another. `is_settled` says of the last item whether what follows changes
    nothing about them, and `revised` how many items at its end an agent may send in another form next time.
    """
    if not isinstance(items, History):
        return translate(0, len(items) if isinstance(items, list) else 0)
    previous = items.known_translations.get(form)
    marks = [] if previous is None else [mark for mark in previous.marks if mark[0] <= items.shared]
    first, reused = marks[-1] if marks else (0, 0)
    stops = [len(items)]
    if revised:
        earlier = range(len(items) - revised, first, -1)
        stops = [*islice((at for at in earlier if is_settled(items[at - 1])), 1), *stops]
    new: list[Any] = []
    for stop in stops:
        new += translate(first, stop)
        first = stop
        if stop and is_settled(items[stop - 1]):
            marks.append((stop, reused + len(new)))
    result = History(new) if previous is None or not reused else _continued(previous, reused, new)
    result.marks = marks[-MARKS:]
    items.translations[form] = result
    return result


def _continued(previous: History, reused: int, new: list[Any]) -> History:
    """Return the first `reused` items and the new ones. What was sent in another form may be translated to the same."""
    pairs = zip(previous[reused:], new, strict=False)
    again = sum(1 for _ in takewhile(lambda pair: codec.dumps(pair[0]) == codec.dumps(pair[1]), pairs))
    return History([*previous[: reused + again], *new[again:]], previous, reused + again)


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


def _addition(value: Any, digest: Digest | History, earlier: Digest | History | None) -> dict[str, Any]:
    """Return what a field adds to the `earlier` one of that name; `digest` is the value's, if it is no `History`."""
    if not isinstance(digest, list) or not isinstance(earlier, list):
        return {} if digest == earlier else {"value": value}
    count = _common(earlier, digest)
    if count == len(value) == len(earlier):
        return {}
    return {"items": count, "value": value[count:]} if count else {"value": value}
