"""A policy that is a Python callable in the SDK process, seen from the daemon."""

from __future__ import annotations

from typing import Any

from gymgate import codec
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
        request = raw if raw is not None else codec.dumps(body)
        try:
            answer = await self._peer.exchange("policy", {"name": self._endpoint.name}, request)
        except StackLostError as error:
            raise PolicyError(f"the process that serves {self._endpoint.name!r} is gone") from error
        try:
            return BackendAnswer(*codec.parse(answer.body))
        except ValueError as error:
            raise PolicyError(f"callable {self._endpoint.name!r} returned a dict that is {error}") from error

    async def close(self) -> None:
        """Nothing to release."""
