"""Which requests repeat an earlier call, so that the endpoint is asked once.

    client ----request----> gateway ----> endpoint          one call upstream
    client --X (connection breaks)
    client ----request----> gateway (joins that call, or gets its answer)

NeMo Gym's client sends a request again after a dropped connection and does not say so, while equal requests are otherwise
new samples (parallel calls, best-of-n, loops). So an unmarked request joins an earlier call only if the two are equal and
the earlier one's connection was lost before its answer was fully written, that is, handed to the kernel. A marked retry
(`Idempotency-Key`, or `x-stainless-retry-count` as the OpenAI and Anthropic SDKs send it) also gets an answer that was
written to a connection that is gone by now, unless that answer was an error: then the retry is a new call.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gymgate.gateway.call import Call

RECENT_ANSWERS = 16
MARKED_ANSWERS = 256
"""Answers kept of calls without an idempotency key, and with one."""
KEPT_BYTES = 4 << 20
"""Limit on the bytes of requests and answers kept for either purpose; the newest one is kept whatever its size."""
HASHED = 2048
"""Bytes of each end of a long body that are hashed."""


class RequestKey(NamedTuple):
    """Equal for requests that may be the same call."""

    model_server: str
    dialect: str
    body: bytes
    idempotency_key: str | None

    def __hash__(self) -> int:
        """Hash a long body's ends only: hashing a megabyte takes as long as passing it on, and equality compares it all."""
        body: object = self.body
        if len(self.body) > 2 * HASHED:
            body = (len(self.body), self.body[:HASHED], self.body[-HASHED:])
        return hash((self.model_server, self.dialect, body, self.idempotency_key))


def is_marked_retry(headers: Mapping[str, str]) -> bool:
    """Whether the sender says that it sent this request before."""
    count = headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and bool(count.strip("0"))


class _Recent(NamedTuple):
    """An answered call without an idempotency key."""

    key: RequestKey
    call: Call
    size: int
    """Bytes of its request and answer."""


@dataclass(slots=True)
class _Marked:
    """A call with an idempotency key."""

    call: Call
    size: int = 0
    """Bytes of its request and answer, once that was written."""


class RetryDeduplicator:
    """One rollout's calls whose answers may still be asked for again.

    It holds requests under way, and up to `KEPT_BYTES` of answered ones of either kind. A call's `payload` is dropped with
    its last entry here.
    """

    def __init__(self) -> None:
        self._unwritten: dict[RequestKey, list[Call]] = {}
        self._recent: deque[_Recent] = deque()
        self._recent_bytes = 0
        self._marked: OrderedDict[RequestKey, _Marked] = OrderedDict()
        self._marked_bytes = 0
        """Their sizes together, here and below: adding them up anew for every call took 1.5 ms of it."""

    def find(self, key: RequestKey, *, retry: bool) -> Call | None:
        """Return the call that this request repeats, if it repeats one."""
        if key.idempotency_key is not None:
            # The key names the call: an equal request with another one is another sample, also if a connection broke.
            marked = self._marked.get(key)
            return None if marked is None or marked.call.failed else marked.call
        for call in self._unwritten.get(key, ()):
            if call.connection_lost:
                return call
        for entry in self._recent if retry else ():
            if entry.key == key and entry.call.connection_lost and not entry.call.failed:
                self._recent.remove(entry)
                self._recent_bytes -= entry.size
                return entry.call
        return None

    def add(self, key: RequestKey, call: Call) -> None:
        """Remember a new call."""
        # Several, since best-of-n sends equal requests at the same time.
        self._unwritten.setdefault(key, []).append(call)
        if key.idempotency_key is not None:
            if (earlier := self._marked.get(key)) is not None:
                self._marked_bytes -= earlier.size
            self._marked[key] = _Marked(call)

    def note_delivery(self, key: RequestKey, call: Call) -> None:
        """Note that the call's answer was fully written to the connection that asked for it last."""
        self.forget(key, call)
        size = len(key.body) + len(call.payload)
        if key.idempotency_key is not None:
            if (marked := self._marked.get(key)) is not None and marked.call is call:
                self._marked_bytes += size - marked.size
                marked.size = size
            # The newest stays whatever its size, or nobody could ask again for a long answer.
            while len(self._marked) > MARKED_ANSWERS or (
                self._marked_bytes > KEPT_BYTES and len(self._marked) > 1
            ):
                oldest, evicted = self._marked.popitem(last=False)
                self._marked_bytes -= evicted.size
                if oldest not in self._unwritten:  # else its answer is still to be written
                    evicted.call.payload = b""
        elif call.failed:
            call.payload = b""
        else:
            self._recent.append(_Recent(key, call, size))
            self._recent_bytes += size
            while len(self._recent) > RECENT_ANSWERS or (
                self._recent_bytes > KEPT_BYTES and len(self._recent) > 1
            ):
                evicted_recent = self._recent.popleft()
                self._recent_bytes -= evicted_recent.size
                evicted_recent.call.payload = b""

    def forget(self, key: RequestKey, call: Call) -> None:
        """From now on, treat an equal request without a retry mark as a new call."""
        calls = self._unwritten.get(key)
        if calls and call in calls:
            calls.remove(call)
            if not calls:
                del self._unwritten[key]
