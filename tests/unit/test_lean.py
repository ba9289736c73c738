"""When servers get lean middlewares, as far as NeMo Gym's interpreter is not needed to see it."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.gym.inside import lean
from gymgate.runs.described.settings import differences


def test_code_that_was_not_checked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(Path(json.__file__).read_bytes()).hexdigest()
    monkeypatch.setattr(lean, "CHECKED", {"json": ("0", digest)})
    assert lean.unchecked(lean.CHECKED) is None
    monkeypatch.setattr(lean, "CHECKED", {"json": ("0",)})
    assert "json" in str(lean.unchecked(lean.CHECKED))
    monkeypatch.setattr(lean, "CHECKED", {"json": ("0", digest), "no_such_package.module": (digest,)})
    assert "no_such_package" in str(lean.unchecked(lean.CHECKED))


def test_without_checked_code_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lean, "CHECKED", {"json": ("0",)})
    noted = tmp_path / "noted.json"
    lean.install(noted)  # it would fail here, where there is no nemo_gym
    assert list(json.loads(noted.read_text())) == ["every middleware"]
    assert "json" in capsys.readouterr().out


async def test_both_ends_of_a_connection_in_memory_hear_that_one_was_closed() -> None:
    lost = asyncio.Queue[str]()

    class End(asyncio.Protocol):
        def __init__(self, name: str) -> None:
            self.name = name

        def connection_lost(self, error: Exception | None) -> None:
            lost.put_nowait(self.name)

    ends = [lean.MemoryTransport(contextvars.copy_context()) for _ in range(2)]
    for end, other, name in zip(ends, reversed(ends), ("client", "server"), strict=True):
        end.start(End(name), other, ("127.0.0.1", 1))
    ends[0].close()
    async with asyncio.timeout(10):
        assert {await lost.get(), await lost.get()} == {"client", "server"}


async def test_who_sends_more_in_memory_than_the_other_end_reads_is_paused() -> None:
    class End(asyncio.Protocol):
        paused = False

        def pause_writing(self) -> None:
            self.paused = True

    ends, protocols = [lean.MemoryTransport(contextvars.copy_context()) for _ in range(2)], (End(), End())
    for end, other, protocol in zip(ends, reversed(ends), protocols, strict=True):
        end.start(protocol, other, ("127.0.0.1", 1))
    ends[1].pause_reading()
    data = b"x" * (lean.MOST_WAITING + 1)
    ends[0].write(data)
    assert ends[0].get_write_buffer_size() == len(data)
    assert [protocol.paused for protocol in protocols] == [True, False]


async def test_a_request_with_traces_goes_over_a_socket() -> None:
    """Its client counts what happens there."""
    calls: Any = lean.OwnCalls.__new__(lean.OwnCalls)
    calls._server, calls._loop, calls._address = object(), asyncio.get_running_loop(), ("127.0.0.1", 1)

    async def over_socket(*_: Any) -> str:
        return "over a socket"

    connector: Any = SimpleNamespace(_create_connection=over_socket, _factory=object)
    calls._connect(connector)
    url = SimpleNamespace(scheme="http", host="127.0.0.1", port=1)
    request = SimpleNamespace(url=url, proxy=None)
    assert await connector._create_connection(request, ["a trace"], None) == "over a socket"


def test_a_run_goes_on_with_other_middlewares() -> None:
    before = {"nemo_gym": "0.7.0", "middlewares": {"mcqa": {"mcqa": "lean"}}}
    assert not differences(before, {"nemo_gym": "0.7.0"})
    assert not differences(before, {**before, "middlewares": {"mcqa": {"mcqa": "as in NeMo Gym"}}})
