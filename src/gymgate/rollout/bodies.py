"""Bodies of model calls, each kept and handed over once.

The requests of a conversation repeat: each holds the one before it and a little more. A `BodyLog` keeps only what each body
adds, so that a rollout's record grows with the conversation and not with its square:

    request 1   {"model": "m", "input": [a]}
    request 2   {"model": "m", "input": [a, b, c]}        kept as: 28 bytes of request 1, `, b, c`, its last 2 bytes
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gymgate import codec

RECENT = 6
"""Whole bodies in memory while bodies are added or read, so that conversations that take turns find their own."""
_CONVERSATION = ("input", "messages")


class Delta(NamedTuple):
    """A body as its difference from an earlier one of the same log."""

    base: int
    """Position of the earlier body; -1: none, and `middle` is the whole body."""
    head: int
    """Bytes that both begin with."""
    tail: int
    """Bytes that both end with."""
    middle: bytes


class BodyLog:
    """Bodies in the order of adding. Memory: the sum of what each body adds, and `RECENT` whole bodies."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=RECENT)

    def add(self, body: bytes) -> int:
        """Keep a body and return its position."""
        delta = Delta(-1, 0, 0, body)
        for position, earlier in reversed(self._recent):
            found = _delta(position, earlier, body)
            if len(earlier) < 2 * (found.head + found.tail):  # most of the earlier body is in this one
                delta = found
                break
        self.deltas.append(delta)
        self._recent.append((len(self.deltas) - 1, body))
        return len(self.deltas) - 1


class BodyReader:
    """Returns the bodies of a log, as bytes or parsed. Reading them in order copies each body once."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self._deltas = deltas
        self._whole: OrderedDict[int, bytes] = OrderedDict()
        self._parsed: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._deltas)

    def body(self, position: int) -> bytes:
        """Return the body at a position of the log."""
        chain = []
        at = position
        while at >= 0 and at not in self._whole:
            chain.append(at)
            at = self._deltas[at].base
        whole = self._whole[at] if at >= 0 else b""
        for at in reversed(chain):
            _, head, tail, middle = self._deltas[at]
            whole = b"".join((whole[:head], middle, whole[len(whole) - tail :]))
        self._whole[position] = whole
        if len(self._whole) > RECENT:
            self._whole.popitem(last=False)
        return whole

    def parsed(self, position: int) -> dict[str, Any]:
        """Return the body as a dict. Items of a conversation that an earlier body has too are the same objects."""
        if position not in self._parsed:
            value = dict(codec.loads(self.body(position)))
            earlier = self._parsed.get(self._deltas[position].base, {})
            for name in _CONVERSATION:
                _share(earlier.get(name), value.get(name))
            self._parsed[position] = value
        return self._parsed[position]


class RecordedBodies:
    """The bodies of one call: requests by their position in a log, answers as bytes. See `record.BodySource`."""

    def __init__(
        self, reader: BodyReader, requests: Mapping[str, int | None], answers: Mapping[str, bytes | None]
    ) -> None:
        self._reader = reader
        self._requests = requests
        self._answers = answers

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the body of that name; `None` if it was not kept, or there is none."""
        if (position := self._requests.get(name)) is not None:
            return self._reader.parsed(position)
        answer = self._answers.get(name)
        return None if answer is None else dict(codec.loads(answer))


def _delta(position: int, earlier: bytes, body: bytes) -> Delta:
    head = _common_prefix(earlier, body)
    longest = min(len(earlier), len(body)) - head
    ends = (text[len(text) - longest :][::-1] for text in (earlier, body))
    tail = _common_prefix(*ends)
    return Delta(position, head, tail, body[head : len(body) - tail])


def _common_prefix(one: bytes, other: bytes) -> int:
    """Return how many bytes both begin with. Compares blocks, which is as fast as comparing memory."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _share(earlier: Any, later: Any) -> None:
    """Replace equal items at the beginning of the later list by the earlier list's."""
    if not isinstance(earlier, list) or not isinstance(later, list):
        return
    for number, (item, same) in enumerate(zip(earlier, later, strict=False)):
        if item != same:
            return
        later[number] = item
