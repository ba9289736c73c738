"""The endpoints that a lease's rollouts use: each is sent to the daemon once, and rollouts name it by its number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gymgate.core.config import HTTPEndpoint
from gymgate.stack.wire import endpoint_to_wire

KEPT = 16
"""Endpoints that stay registered although no rollout uses them. A run has one or a few; some SDKs make one for each rollout."""

_Key = tuple[HTTPEndpoint, str]


@dataclass
class _Registered:
    number: int
    rollouts: int = 0
    """Those under way that use it."""


class RegisteredEndpoints:
    """Which endpoints the daemon at the other end of one lease knows, and by which number. `tell` sends it a message."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._numbers = itertools.count()
        self._registered: dict[_Key, _Registered] = {}
        self._unused: dict[_Key, None] = {}
        """Those of them that no rollout uses, the least recently used first."""

    @contextmanager
    def number_of(self, endpoint: HTTPEndpoint) -> Iterator[int]:
        """Give the endpoint's number, which stays valid inside the block.

        Raises `ConfigError` if the variable of its key is not set, and `DataError` for settings that JSON cannot hold.
        """
        endpoint = endpoint.resolved()
        key = (endpoint, repr(endpoint.sampling))  # 1, 1.0 and True are equal, but another text in JSON
        registered = self._registered.get(key)
        if registered is None:
            registered = _Registered(next(self._numbers))
            self._tell("register", number=registered.number, endpoint=endpoint_to_wire(endpoint))
            self._registered[key] = registered
        self._unused.pop(key, None)
        registered.rollouts += 1
        try:
            yield registered.number
        finally:
            registered.rollouts -= 1
            if not registered.rollouts:
                self._unused[key] = None
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._unused) > KEPT:
            key = next(iter(self._unused))
            del self._unused[key]
            self._tell("forget", number=self._registered.pop(key).number)
