"""Connections that nobody vouches for yet: few, and for a short time, so that they do not use up the open files."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gymgate.gateway.socket_owners import is_own, user_of

ADMISSION_S = 10.0
"""For a connection to send a live rollout's key, unless it comes from this user's own process."""
MOST = 32
"""Newcomers at once; one more closes the oldest."""


class Newcomers:
    """The connections of a gateway whose sender has not been checked, oldest first.

    A connection ceases to be one when a request on it is served, or when it is found to be this user's own. Those that are
    late, or too many, are closed. So other users and other machines hold at most `MOST` without a key.
    """

    def __init__(self) -> None:
        self._timers: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def add(self, connection: web.RequestHandler) -> None:
        """Note a connection that has just been made."""
        loop = asyncio.get_running_loop()
        self._timers[connection] = loop.call_later(ADMISSION_S, self._check, connection)
        if len(self._timers) > MOST:
            self._check(next(iter(self._timers)))

    def remove(self, connection: web.RequestHandler | None) -> None:
        """Forget a connection that is served or lost. Idempotent."""
        if connection is not None and (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()

    def _check(self, connection: web.RequestHandler) -> None:
        self.remove(connection)
        if not is_own(user_of(connection.transport)) and connection.transport is not None:
            connection.transport.abort()
