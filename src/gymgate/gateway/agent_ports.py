"""Gateway ports of one agent process, for agents that cannot forward the rollout key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gymgate.gateway.requests import Refusal
from gymgate.gateway.route import Route

_NOT_HELD = (
    "no rollout holds this agent process: the rollout that this call was made for has ended, "
    "or the call was made outside of one"
)


class AgentPorts:
    """One port per model server. A call without a key belongs to the rollout that holds the ports.

    A key in the request takes precedence. Made by `Gateway.agent_ports`; the ports last as long as the gateway.
    """

    def __init__(self, listen: Callable[[str, AgentPorts], Awaitable[int]]) -> None:
        self.route: Route | None = None
        """The rollout that holds the ports; set by `stack.agent_processes`."""
        self._listen = listen
        self._ports: dict[tuple[str, str], int] = {}

    async def port_for(self, name: str, model_server: str | None = None) -> int:
        """Return the port for `name` in the agent's config; its calls go to `model_server` (default: `name`)."""
        key = (name, model_server or name)
        if key not in self._ports:
            self._ports[key] = await self._listen(key[1], self)
        return self._ports[key]

    def holder(self) -> Route:
        """Return the rollout's route. Raises `Refusal` if no live rollout holds the ports."""
        if self.route is None or self.route.closed:
            raise Refusal(404, _NOT_HELD)
        return self.route
