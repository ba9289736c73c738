"""Backends answer model calls: an HTTP server, a Python callable, recorded rollouts."""

from __future__ import annotations

from collections.abc import Mapping

from gymgate.config import CallableEndpoint, Endpoint, HTTPEndpoint, ReplayEndpoint
from gymgate.errors import ConfigError
from gymgate.gateway.backends.balance import BalancedBackend, ReplicaPool
from gymgate.gateway.backends.base import Backend, BackendAnswer
from gymgate.gateway.backends.callable import CallableBackend, PolicyCallable
from gymgate.gateway.backends.http import HTTPBackend
from gymgate.http_client import HTTPClient

__all__ = [
    "Backend",
    "BackendAnswer",
    "BalancedBackend",
    "CallableBackend",
    "HTTPBackend",
    "PolicyCallable",
    "ReplicaPool",
    "make_backend",
]


def make_backend(
    endpoint: Endpoint,
    *,
    client: HTTPClient | None = None,
    callables: Mapping[str, PolicyCallable] | None = None,
    pool: ReplicaPool | None = None,
) -> Backend:
    """Make the backend that an endpoint describes; the caller closes it.

    `client` is shared by HTTP backends; `callables` are those that a `CallableEndpoint` may name;
    `pool` is the state of the endpoint's replicas, shared with other backends.
    Raises `ConfigError` for a key that is not set, a malformed URL or an unknown callable, `DataError` for
    recordings that cannot be read.
    """
    match endpoint:
        case HTTPEndpoint(replicas=replicas) if replicas:
            own = pool is None
            return BalancedBackend(endpoint, pool or ReplicaPool(endpoint.base_urls, client), owns_pool=own)
        case HTTPEndpoint():
            return HTTPBackend(endpoint, client)
        case CallableEndpoint():
            return _callable_backend(endpoint, callables or {})
        case ReplayEndpoint():
            from gymgate.gateway.replay.backend import ReplayBackend

            return ReplayBackend(endpoint.rollouts, endpoint.index)
    raise ConfigError(f"{endpoint!r} is not an endpoint; give an HTTPEndpoint, a ReplayEndpoint or a Backend")


def _callable_backend(endpoint: CallableEndpoint, callables: Mapping[str, PolicyCallable]) -> CallableBackend:
    if endpoint.name not in callables:
        known = ", ".join(sorted(callables)) or "none"
        raise ConfigError(f"no callable is registered as {endpoint.name!r} (registered: {known})")
    return CallableBackend(callables[endpoint.name], endpoint.dialect, endpoint.timeout_s)
