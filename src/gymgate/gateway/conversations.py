"""Parses a rollout's requests, each as what it adds to an earlier one, so that no call costs more the more was sent before.

    earlier   {"model":"m","input":[a,b],"top_p":1}
    now       {"model":"m","input":[a,b,c,d],"top_p":1}
              |------ head -------|      the same bytes as before, so the same items: a and b are not parsed again
    parsed    {"model":"m","input":["<mark>",c,d],"top_p":1}

JSON says the same of a list's items whatever stands around them. So the bytes between the list's opening and the end of its last
item, once they have been parsed as a list of their own, can be left out of a later request that begins with them. The mark shows
that what follows belongs to that list: a second field of the same name would take its place.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.gateway.dialects.content import text_and_refusal
from gymgate.gateway.dialects.messages_request import MOVED_MARKS
from gymgate.rollouts.history import History, Start

RECENT = 6
"""Conversations of a rollout that take turns, as those of several agents do."""
KEPT_BYTES = 8 << 20
"""Limit on the bytes of their requests. Longer ones are parsed anew each time, so that a rollout cannot fill the memory."""
KEPT_VALUES = 1 << 18
"""Limit on the values in a request that is kept: one takes up to a hundred bytes."""
_TRIES = 8
"""Places at which the end of a list is looked for."""
_MARK = secrets.token_hex(16)
"""Nothing that an agent sends is equal to it."""
_QUOTED_MARK = codec.dumps(_MARK)
FIELDS: Mapping[Dialect, str] = {"responses": "input", "chat": "messages", "messages": "messages"}
"""The field of a request that holds the conversation."""
_OPENINGS = {name: re.compile(rb'"%b"\s*:\s*\[' % name.encode()) for name in set(FIELDS.values())}


class Conversations:
    """The requests of one rollout to one model server that later ones may extend."""

    def __init__(self) -> None:
        self._requests: deque[_Request] = deque(maxlen=RECENT)

    def parse(self, raw: bytes, dialect: Dialect) -> tuple[Any, bytes]:
        """As `codec.parse_bounded`. The conversation in an object is a `History`, unless it is too large to be kept or
        had to be written anew."""
        # Of all that it begins with, the one that leaves the least to parse.
        ends = {request: end for request in self._requests if (end := request.common_end(raw, dialect))}
        base = max(ends, key=lambda request: ends[request].offset, default=None)
        body = base.parse_extension(raw, ends[base]) if base is not None else None
        if base is None or body is None:
            body, written = codec.parse_bounded(raw)
            if written is not raw:  # other bytes, and of NaN another value, than the next request begins with
                return body, written
            self._keep(raw, body, dialect, None)
        else:
            self._keep(raw, body, dialect, (base, ends[base]))
        return body, raw

    def _keep(self, raw: bytes, body: Any, dialect: Dialect, base: tuple[_Request, _End] | None) -> None:
        field = FIELDS[dialect]
        items = body.get(field) if isinstance(body, dict) else None
        if not isinstance(items, list) or not items:
            return
        # Counted before anything is kept: a body of two bytes a value takes a hundred times its length.
        values = codec.count_values(raw if base is None else raw[base[1].offset :])
        values += 0 if base is None else base[0].values_until(base[1])
        if values > KEPT_VALUES or len(raw) > KEPT_BYTES:
            body[field] = list(items)
            return
        history = items if isinstance(items, History) else History(items)
        body[field] = history
        if base is None:
            opening = _OPENINGS[field].search(raw)
            head, start = (0, 0) if opening is None else (opening.end(), opening.end())
        else:
            head, start = base[0].head, base[1].offset
        end = _end_of_items(raw, body, field, start) if head else -1
        if end < 0:
            return
        if base is not None:
            self._requests.remove(base[0])  # in most cases this is the conversation that went on from there
        tail = raw[end:] if base is None else None
        self._requests.append(_Request(raw[:end].rstrip(), dialect, head, start, tail, history, values))
        while sum(len(request.text) for request in self._requests) > KEPT_BYTES:
            self._requests.popleft()


class _End(NamedTuple):
    """Where an item of a request ends."""

    offset: int
    items: int
    """How many have ended there."""


class _Request:
    """A request's text, up to the end of its conversation's last item."""

    def __init__(
        self,
        text: bytes,
        dialect: Dialect,
        head: int,
        checked: int,
        tail: bytes | None,
        items: History,
        values: int,
    ) -> None:
        """`checked`: up to there the text is known to hold these items; the rest is checked only if another request begins
        with it, since most first requests are the last. `tail`: what followed the text, if that is to be checked too."""
        self.text = text
        self.head = head
        """Where the list begins, behind its bracket."""
        self._dialect = dialect
        self._items = items
        self._values = values
        self._checked = checked
        self._tail = tail
        self._is_valid = True
        # Agents of this API move their marks for the cache on with each call, and so change the last messages once more.
        self._ends: list[_End] = [
            _End(len(text), len(items)),
            *(self._earlier_ends() if dialect == "messages" else ()),
        ]

    def _earlier_ends(self) -> Iterator[_End]:
        """Yield where the last items but one, two and so on end, if their text is as `codec.dumps` writes it."""
        at = len(self.text)
        for count in range(len(self._items) - 1, max(0, len(self._items) - 1 - MOVED_MARKS), -1):
            written = codec.dumps(self._items[count])
            at -= len(written) + 1
            if at <= self.head or self.text[at : at + 1 + len(written)] != b"," + written:
                return
            yield _End(at, count)

    def common_end(self, raw: bytes, dialect: Dialect) -> _End | None:
        """Return the last end of an item up to which a request begins with this one, if it may go on its conversation."""
        if self._is_valid and dialect == self._dialect:
            for end in self._ends:
                near = slice(
                    max(0, end.offset - 64), end.offset
                )  # few others are equal there, and need no copy
                text = self.text if end.offset == len(self.text) else None
                if raw[near] == self.text[near] and raw.startswith(text or self.text[: end.offset]):
                    return end
        return None

    def values_until(self, end: _End) -> int:
        """Return how many values, or more, it has up to an end."""
        return self._values - codec.count_values(self.text[end.offset :])

    def parse_extension(self, raw: bytes, end: _End) -> dict[str, Any] | None:
        """Parse a request that begins with this one up to an end; `None` if it has to be parsed whole."""
        if not self._check():
            return None
        field, offset = FIELDS[self._dialect], end.offset
        text = self.text[: self.head] + _QUOTED_MARK + raw[offset:]
        body = _parsed_as_it_is(text, self.values_until(end))
        items = body.get(field) if isinstance(body, dict) else None
        if not isinstance(items, list) or items[:1] != [_MARK]:
            return None
        history = History([*self._items[: end.items], *items[1:]], self._items, end.items)
        return {**body, field: history}

    def _check(self) -> bool:
        """Whether what stands between `head` and the end are this list's items, no more and no fewer."""
        if self._is_valid and (self._checked < len(self.text) or self._tail is not None):
            is_first = self._checked == self.head
            piece = self.text[self._checked :]
            items = _parsed_as_it_is(b"[%b%b]" % (b"" if is_first else _QUOTED_MARK, piece))
            new = len(self._items) - self._items.shared + (not is_first)
            self._is_valid = isinstance(items, list) and len(items) == new
            if self._tail is not None:
                around = _parsed_as_it_is(self.text[: self.head] + _QUOTED_MARK + self._tail)
                field = FIELDS[self._dialect]
                self._is_valid &= isinstance(around, dict) and around.get(field) == [_MARK]
            self._checked, self._tail = len(self.text), None
        return self._is_valid


def _parsed_as_it_is(text: bytes, values_before: int = 0) -> Any:
    """Parse JSON; `None` for what is none, and for what is passed on changed or not at all."""
    try:
        value, same = codec.parse_bounded(text, values_before=values_before)
    except ValueError:
        return None
    return value if same is text else None


def _end_of_items(raw: bytes, body: dict[str, Any], field: str, start: int) -> int:
    """Return where the list's closing bracket probably stands, behind `start`; -1 if it was not found."""
    names = list(body)
    following = names[names.index(field) + 1 :]
    if not following:
        return raw.rfind(b"]", start)
    at, name = len(raw), codec.dumps(following[0])
    for _ in range(_TRIES):
        at = raw.rfind(name, start, at)
        end = raw.rfind(b"]", start, at) if at > 0 else -1
        if end < 0 or raw[end + 1 : at].strip() == b",":
            return end
    return -1


def session_id(body: Mapping[str, Any], dialect: Dialect, model_server: str, secret: str) -> str:
    """Return the id of a request's conversation: the same for all that begin alike, up to the user's first message.

    Agents that a rollout starts for parts of its task begin otherwise, and so have sessions of their own. Who does not know
    `secret` learns nothing from the id.
    """
    settings = codec.dumps([model_server, body.get("instructions"), body.get("system")])
    start = _start(body.get(FIELDS[dialect]))
    return hashlib.blake2b(settings + start, digest_size=16, key=secret.encode()).hexdigest()


def _start(items: Any) -> bytes:
    """Return a digest of a conversation's items up to the user's first message: of their texts, since marks for caches move."""
    if isinstance(items, History) and items.start is not None:
        return items.start.digest
    start: list[Any] = []
    for item in items if isinstance(items, list) else [items]:
        is_message = isinstance(item, dict) and isinstance(item.get("content"), str | list)
        start.append((item.get("role"), text_and_refusal(item["content"])[0]) if is_message else item)
        if isinstance(item, dict) and item.get("role") == "user":
            break
    digest = hashlib.blake2b(codec.dumps(start), digest_size=16).digest()
    if isinstance(items, History):
        items.start = Start(len(start), digest)
    return digest
