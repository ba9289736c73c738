"""A policy that is a Python callable in the SDK process, seen from the daemon."""

from __future__ import annotations

from typing import Any

import orjson

from gymgate.config import CallableEndpoint, Dialect
from gymgate.errors import PolicyError, StackLostError
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.stack.protocol import Peer


class RemoteBackend:
    """Sends each call back over the connection that asked for the rollout. See `Backend`."""

    dialect: Dialect

    def __init__(self, peer: Peer, endpoint: CallableEndpoint) -> None:
        self.dialect = endpoint.dialect
        self._peer = peer
        self._endpoint = endpoint

    async def call(self, body: dict[str, Any], *, raw: bytes | None = None) -> BackendAnswer:
        """See `Backend.call`."""
        request = orjson.Fragment(raw) if raw is not None else body
        try:
            answer = await self._peer.call("policy", endpoint=self._endpoint.model_dump(), body=request)
        except StackLostError as error:
            raise PolicyError(f"the process that serves {self._endpoint.name!r} is gone") from error
        return BackendAnswer(body=answer)

    async def close(self) -> None:
        """Nothing to release."""
