"""Ports of an agent that passes no key on: what is asked there is asked by the rollout that holds the slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gymgate.gateway.requests import Refusal
from gymgate.gateway.route import Route

_FREE = (
    "no rollout holds this agent's slot: the rollout that this call was made for has ended, "
    "or the call was made outside of one"
)


class Slot:
    """One port per model server, all of them one rollout's at a time.

    A key that a request does carry goes before the slot. Made by `Gateway.slot`; its ports last as long as the gateway.
    """

    def __init__(self, listen: Callable[[str, Slot], Awaitable[int]]) -> None:
        self.route: Route | None = None
        """Whose calls arrive here; set by whoever leases the slot out."""
        self._listen = listen
        self._ports: dict[tuple[str, str], int] = {}

    async def port_for(self, name: str, model_server: str | None = None) -> int:
        """The port that stands for `name` in the agent's config; its calls are those to `model_server` (`name`)."""
        key = (name, model_server or name)
        if key not in self._ports:
            self._ports[key] = await self._listen(key[1], self)
        return self._ports[key]

    def holder(self) -> Route:
        """The rollout's route; `Refusal` if there is none, or it is closed."""
        if self.route is None or self.route.closed:
            raise Refusal(404, _FREE, "not_found_error")
        return self.route
