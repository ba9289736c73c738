"""The interface of backends, which answer model calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gymgate.core.config import Dialect
from gymgate.core.retrying import Note, unnoted
from gymgate.rollouts.record import Usage

PolicyCallable = Callable[[dict[str, Any]], Any]
"""Takes a request dict in the endpoint's dialect and returns an answer, or a coroutine of one: a string, an assistant's message,
a chat completion or a response; as a dict or as an SDK's object."""


@dataclass(slots=True)
class BackendAnswer:
    """An endpoint's successful answer to one call, in the backend's own dialect."""

    body: dict[str, Any]
    raw: bytes | None = None
    """The answer's bytes as received, if they can be passed on unchanged."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further facts for the call's record (replica, matched recording, ...)."""
    usage: Usage | None = None
    """The body's token counts, if the backend has read them."""


class Backend(Protocol):
    """Answers model calls in one dialect. One backend serves many rollouts at once.

    `call` raises `PolicyError` (with the upstream's status code, where it gave one) for every failure;
    cancelling it abandons the call.
    """

    @property
    def dialect(self) -> Dialect:
        """The dialect of its requests and answers."""
        ...

    async def call(
        self,
        body: dict[str, Any],
        *,
        raw: bytes | None = None,
        session: str | None = None,
        note: Note = unnoted,
    ) -> BackendAnswer:
        """Answer `body`, a request in `self.dialect`; `raw` is its serialised form, if already at hand.

        `session` is the id of its conversation; `note` see `Note`. A backend does not change the body.
        """
        ...
