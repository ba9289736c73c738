"""The gateway: every model call of every rollout, each to its own rollout's endpoint, recorded on the way.

async with Gateway() as gateway:
    route = gateway.open(HTTPEndpoint(base_url="http://host:8000/v1"))
    ...                       # agents call route.base_url
    await route.close()
    route.calls               # requests and answers
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gymgate.gateway.agent_ports import AgentPorts
    from gymgate.gateway.backends import Backend, BackendAnswer, CallableBackend, HTTPBackend, make_backend
    from gymgate.gateway.handler import StreamTimes
    from gymgate.gateway.requests import METADATA_KEY
    from gymgate.gateway.route import Route
    from gymgate.gateway.server import Gateway

__all__ = [
    "METADATA_KEY",
    "AgentPorts",
    "Backend",
    "BackendAnswer",
    "CallableBackend",
    "Gateway",
    "HTTPBackend",
    "Route",
    "StreamTimes",
    "make_backend",
]

# Imported when used: the dialects are pure functions that need no server.
_MODULES = {
    "METADATA_KEY": "requests",
    "AgentPorts": "agent_ports",
    "Gateway": "server",
    "Route": "route",
    "StreamTimes": "handler",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gymgate.gateway' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gymgate.gateway.{_MODULES.get(name, 'backends')}"), name)
    globals()[name] = value
    return value
