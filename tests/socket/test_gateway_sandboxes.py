"""The policy's port at an address for sandboxes: a rollout's key opens its rollout, and nobody gets anything without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from gymgate.core.config import StackConfig
from gymgate.core.errors import ConfigError
from gymgate.gateway.server import Gateway
from support.upstream import Upstream

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OUTSIDE = "127.0.0.2"
"""Another address of this machine that needs no interface; the gateway takes it for one of a sandbox's network."""


@pytest.fixture
async def gateway(policy: Upstream) -> AsyncIterator[Gateway]:
    async with Gateway(judges={"judge": policy.endpoint()}, sandbox_host=OUTSIDE) as running:
        yield running


async def ask(host: str, port: int, path: str, method: str = "POST", **fields: Any) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method, f"http://{host}:{port}{path}", json={**BODY, **fields} if method == "POST" else None
        ) as answer,
    ):
        return answer.status


async def test_a_key_opens_its_rollout_from_either_address(gateway: Gateway, policy: Upstream) -> None:
    route = gateway.open(policy.endpoint())
    path = f"/ng-rollout/{route.key}/v1/chat/completions"
    assert await ask("127.0.0.1", gateway.port, path) == 200
    assert await ask(OUTSIDE, gateway.port, path) == 200
    await route.close()
    assert await ask(OUTSIDE, gateway.port, path) == 404


async def test_nobody_is_served_without_a_key(gateway: Gateway, policy: Upstream) -> None:
    """Not even this user's own processes, which share the machine's network with a container that runs as this user."""
    route = gateway.open(policy.endpoint(), metadata_routing=True)
    assert await ask(OUTSIDE, gateway.port, "/v1/chat/completions") == 401
    assert await ask(OUTSIDE, gateway.port, "/v1/chat/completions", metadata=route.metadata) == 401
    assert await ask(OUTSIDE, gateway.port, "/v1/models", "GET") == 401
    assert await ask(OUTSIDE, gateway.port, f"/ng-rollout/{'0' * 32}/v1/chat/completions") == 404
    assert not policy.seen


async def test_nothing_else_of_the_gateway_is_there(gateway: Gateway, policy: Upstream) -> None:
    """Judges and ports of agent processes answer on loopback alone."""
    ports = gateway.agent_ports()
    ports.route = gateway.open(policy.endpoint())
    for port in (await gateway.port_for("judge"), await ports.port_for("policy_model")):
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(OUTSIDE, port, "/v1/chat/completions")


async def test_an_address_of_another_machine_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"198\.51\.100\.1 .*gateway_host"):
        async with Gateway(sandbox_host="198.51.100.1"):
            pass


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "127.0.0.1", "localhost", "host.docker.internal"])
def test_what_is_no_address_for_sandboxes(address: str) -> None:
    with pytest.raises(ValidationError, match="gateway_host"):
        StackConfig(environments=("e",), gateway_host=address)
