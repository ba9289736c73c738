"""The conversation in a request, and which part of it an earlier request had.

    request 1   [a, b]               [a, b]
    request 2   [a, b, c, d]         [a, b] of request 1, and [c, d]

An agent sends its whole history with every call. What is known of the items of an earlier request (their translation, their place
in the record) need not be found out again, if they are known to be the same. Equal is not enough: 1, 1.0 and true are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import islice, takewhile
from typing import Any, NamedTuple

from gymgate.core import codec

MARKS = 8
"""Places kept at which a translation may be continued: an agent may change the last items of its request in the next one."""


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
    known = items.known_translations.get(form)
    marks = [] if known is None else [mark for mark in known.marks if mark[0] <= items.shared]
    first, kept = marks[-1] if marks else (0, 0)
    stops = [len(items)]
    if revised:
        earlier = range(len(items) - revised, first, -1)
        stops = [*islice((at for at in earlier if is_settled(items[at - 1])), 1), *stops]
    new: list[Any] = []
    for stop in stops:
        new += translate(first, stop)
        first = stop
        if stop and is_settled(items[stop - 1]):
            marks.append((stop, kept + len(new)))
    result = History(new) if known is None or not kept else _continued(known, kept, new)
    result.marks = marks[-MARKS:]
    items.translations[form] = result
    return result


def _continued(known: History, kept: int, new: list[Any]) -> History:
    """Return the first `kept` items and the new ones. What was sent in another form may be translated to the same."""
    pairs = zip(known[kept:], new, strict=False)
    again = sum(1 for _ in takewhile(lambda pair: codec.dumps(pair[0]) == codec.dumps(pair[1]), pairs))
    return History([*known[: kept + again], *new[again:]], known, kept + again)
