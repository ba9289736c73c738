"""Each fork server of a stack has a Ray of its own, whose address no other one overwrites."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gymgate.stack.daemon import forkserver_client
from gymgate.stack.daemon.children import Child
from gymgate.stack.daemon.forkserver_client import ForkServerClient


class Forking(ForkServerClient):
    """A fork server whose Ray writes an address of its own."""

    async def _fork(self, op: str, name: str, log: Path, **order: Any) -> Child:
        Path(order["out"]).write_text(f"address of {self.log.name}")  # noqa: ASYNC240
        await asyncio.sleep(0)
        return Child(name, 1, log, asyncio.get_running_loop().create_future(), self)


async def test_two_fork_servers_find_their_own_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver_client, "ray_directory", lambda: tmp_path)
    nothing: Any = None
    clients = [Forking(nothing, tmp_path / f"forkserver-{n}.log", nothing) for n in "ab"]
    found = await asyncio.gather(*(client.ray_address(print) for client in clients))
    assert found == ["address of forkserver-a.log", "address of forkserver-b.log"]
    assert await clients[0].ray_address(print) == found[0]  # started once
