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
from collections.abc import Mapping
from typing import Any

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.rollouts.history import History

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
        """As `codec.parse_bounded`. The conversation in an object is a `History`, unless it is too large to be kept."""
        field = FIELDS[dialect]
        same = [request for request in self._requests if request.begins(raw, field)]
        base = max(same, key=lambda request: len(request.text), default=None)
        body = base.parse_extension(raw) if base is not None else None
        if body is None:
            base = None
            body, raw = codec.parse_bounded(raw)
        self._keep(raw, body, field, base)
        return body, raw

    def clear(self) -> None:
        """Forget all of them."""
        self._requests.clear()

    def _keep(self, raw: bytes, body: Any, field: str, base: _Request | None) -> None:
        items = body.get(field) if isinstance(body, dict) else None
        if not isinstance(items, list) or not items:
            return
        known = 0 if base is None else len(base.text)
        values = codec.count_values(raw[known:]) + (0 if base is None else base.values)
        if values > KEPT_VALUES or len(raw) > KEPT_BYTES:
            body[field] = list(items)
            return
        if not isinstance(items, History):
            body[field] = items = History(items)
        opening = _OPENINGS[field].search(raw) if base is None else None
        head = base.head if base is not None else opening.end() if opening is not None else 0
        end = _end_of_items(raw, body, field, max(head, known)) if head else -1
        if end < 0:
            return
        if base is not None:
            self._requests.remove(base)  # in most cases this is the conversation that went on from there
        self._requests.append(_Request(raw, field, head, end, items, values, base))
        while sum(len(request.text) for request in self._requests) > KEPT_BYTES:
            self._requests.popleft()


class _Request:
    """A request up to the end of its conversation's last item."""

    def __init__(
        self, raw: bytes, field: str, head: int, end: int, items: History, values: int, base: _Request | None
    ) -> None:
        self.field = field
        self.head = head
        """Where the list begins, behind its bracket."""
        self.text = raw[:end].rstrip()
        self.items = items
        self.values = values
        """Values in `text`, or more."""
        # Whether the list has been recognised rightly is checked only if another request begins with it: most first ones are
        # the last.
        self._tail = raw[end:] if base is None else None
        self._checked = head if base is None else len(base.text)
        self._is_valid = True

    def begins(self, raw: bytes, field: str) -> bool:
        """Whether a request begins with this one and may go on its conversation."""
        return self._is_valid and field == self.field and raw.startswith(self.text)

    def parse_extension(self, raw: bytes) -> dict[str, Any] | None:
        """Parse a request that begins with this one; `None` if it has to be parsed whole."""
        if not self._check():
            return None
        text = self.text[: self.head] + _QUOTED_MARK + raw[len(self.text) :]
        body = _parsed_as_it_is(text, self.values)
        items = body.get(self.field) if isinstance(body, dict) else None
        if not isinstance(items, list) or items[:1] != [_MARK]:
            return None
        return {**body, self.field: History([*self.items, *items[1:]], self.items)}

    def _check(self) -> bool:
        """Whether what stands between `head` and the end are this list's items, no more and no fewer."""
        if self._checked < len(self.text) and self._is_valid:
            is_first = self._tail is not None
            piece = self.text[self._checked :]
            items = _parsed_as_it_is(b"[%b%b]" % (b"" if is_first else _QUOTED_MARK, piece))
            new = len(self.items) - self.items.shared if is_first else len(self.items) - self.items.shared + 1
            self._is_valid = isinstance(items, list) and len(items) == new
            if self._tail is not None:
                around = _parsed_as_it_is(self.text[: self.head] + _QUOTED_MARK + self._tail)
                self._is_valid &= isinstance(around, dict) and around.get(self.field) == [_MARK]
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
    """Return a digest of a conversation's items up to the user's first message."""
    if isinstance(items, History) and items.start is not None:
        return items.start
    start = items
    if isinstance(items, list):
        users = (at for at, item in enumerate(items) if isinstance(item, dict) and item.get("role") == "user")
        start = items[: next(users, 0) + 1]
    digest = hashlib.blake2b(codec.dumps(start), digest_size=16).digest()
    if isinstance(items, History):
        items.start = digest
    return digest
