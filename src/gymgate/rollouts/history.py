"""The conversation in a request, and which part of it an earlier request had.

    request 1   [a, b]               [a, b]
    request 2   [a, b, c, d]         [a, b] of request 1, and [c, d]

An agent sends its whole history with every call. What is known of the items of an earlier request (their translation, their place
in the record) need not be found out again, if they are known to be the same. Equal is not enough: 1, 1.0 and true are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class History(list[Any]):
    """The items of one request. With a `base`, its first `shared` items are those of that earlier request, the same objects.

    Nobody may change an item, nor the list.
    """

    __slots__ = ("_base", "_key", "digests", "known_translations", "shared", "start", "translations")

    def __init__(self, items: list[Any], base: History | None = None) -> None:
        super().__init__(items)
        self.shared = 0 if base is None else len(base)
        self.translations: dict[Hashable, History] = {}
        """What these items became, for the next request to begin with; by the form that they were translated to."""
        self.known_translations = {} if base is None else base.translations
        """What the first `shared` items became."""
        self.start: bytes | None = None if base is None else base.start
        """A digest of what the conversation begins with, once somebody has needed it."""
        self.digests: list[bytes] | None = None
        """One for each item, once somebody has needed them."""
        # Not the base itself, which would keep that of its own, and so every request of the rollout.
        self._key = object()
        self._base = None if base is None else base._key

    def extends(self, other: object) -> bool:
        """Whether it begins with all items of `other`, the same objects."""
        return isinstance(other, History) and self._base is other._key


def translated(
    items: list[Any],
    form: Hashable,
    translate: Callable[[int], list[Any]],
    is_settled: Callable[[Any], bool] = lambda last: True,
) -> list[Any]:
    """Translate a request's items to `form`; those of an earlier request stay as they were translated then.

    `translate` translates the items from a position on. `is_settled` says of a request's last item whether what follows in a
    later request changes nothing about it.
    """
    if not isinstance(items, History):
        return translate(0)
    known = items.known_translations.get(form)
    result = History(translate(0)) if known is None else History([*known, *translate(items.shared)], known)
    if items and is_settled(items[-1]):
        items.translations[form] = result
    return result
