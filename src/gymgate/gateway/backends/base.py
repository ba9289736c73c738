"""What a backend is: the thing that answers a model call, whatever stands behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from gymgate.config import Dialect


@dataclass(slots=True)
class BackendAnswer:
    """An endpoint's successful answer to one call, in the backend's own dialect."""

    body: dict[str, Any]
    raw: bytes | None = None
    """The answer's bytes as received, if they can be passed on unchanged."""
    retries: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    """What the call's record keeps beside the body (replica, matched recording, ...)."""

    def noted(self) -> dict[str, Any]:
        """The details, with the number of retries if there were any."""
        return {**self.details, "retries": self.retries} if self.retries else self.details


class Backend(Protocol):
    """Answers model calls in one dialect. One backend serves many rollouts at once.

    `call` raises `PolicyError` (with the upstream's status code, where it gave one) for every failure;
    cancelling it abandons the call.
    """

    @property
    def dialect(self) -> Dialect:
        """Of the requests it takes and the answers it gives."""
        ...

    async def call(self, body: dict[str, Any], *, raw: bytes | None = None) -> BackendAnswer:
        """Answer `body`, a request in `self.dialect`; `raw` is its serialised form, if already at hand."""
        ...

    async def close(self) -> None:
        """Release connections; calls in flight fail."""
        ...
