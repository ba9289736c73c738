"""A model server that behaves as hosted APIs do: it wants a key, limits the rate, and stops when the quota is used up."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from aiohttp import web

from support.upstream import Seen, say_hello

KEY = "sk-hosted-key"
_QUOTA = "You exceeded your current quota, please check your plan and billing details."


class HostedAPI:
    """A script for `gateway_upstream.upstream`.

    `refused` is the share of calls that are answered with 429, the same ones in each run; `left` the number of calls that
    are paid for.
    """

    def __init__(self, refused: float = 0.0, left: int | None = None, **headers: str) -> None:
        self.answers: list[int] = []
        """The status of each answer."""
        self._refused = refused
        self._left = left
        self._headers = headers
        self._random = random.Random(7)

    async def __call__(self, seen: Seen) -> web.StreamResponse:
        response = await self._answer(seen)
        self.answers.append(response.status)
        return response

    async def _answer(self, seen: Seen) -> web.StreamResponse:
        if seen.headers.get("Authorization") != f"Bearer {KEY}":
            return _error(401, "Incorrect API key provided", "invalid_request_error", "invalid_api_key")
        if self._left is not None and self._left <= len(self.answers):
            return _error(429, _QUOTA, "insufficient_quota", "insufficient_quota", **{"Retry-After": "20"})
        await asyncio.sleep(0)
        if self._random.random() < self._refused:
            message = "Rate limit reached for requests"
            return _error(429, message, "requests", "rate_limit_exceeded", **self._headers)
        return await say_hello(seen)


def _error(status: int, message: str, kind: str, code: str, **headers: Any) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers=headers)
