"""`gymgate view`: who is answered, what a browser is sent while a run grows, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gymgate.core.errors import DataError
from gymgate.results import view
from gymgate.results.growing import GrowingReport
from gymgate.results.view import ReportView, is_for_loopback

HOSTILE = "<script>document.title='run'</script><img src=x onerror=alert(1)>"


def line(key: int, repeat: int, text: str = "so", **fields: Any) -> bytes:
    said = {"output": [{"role": "assistant", "content": text}]}
    result = {"responses_create_params": {"input": "hi"}, "response": said}
    value = {"row_key": f"{key:016x}", "occurrence": 0, "repeat": repeat, "seed": None, "task": key}
    value |= {"source": "s", "line": key + 1, "environment": "e", "agent": "a", "status": "completed"}
    value |= {"reward": float(repeat % 2), "error": None, "result": result, "calls": []}
    return json.dumps({**value, **fields}).encode() + b"\n"


def make_run(path: Path, rollouts: int) -> Path:
    path.mkdir()
    extent = {"rollouts": rollouts, "rows": 1, "repeats": 1, "seeds": None, "shard": [1, 1]}
    described = {
        "format": 1,
        "settings": {"policy": {"model": "m"}},
        "extent": extent,
        "created": 1_700_000_000,
    }
    (path / "run.json").write_text(json.dumps(described))
    return path


def append(run: Path, data: bytes) -> None:
    with (run / "rollouts.jsonl").open("ab") as file:
        file.write(data)


@contextlib.asynccontextmanager
async def served(report: GrowingReport, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    """A view that looks for changes often, however long a reading takes; its URL and port."""
    monkeypatch.setattr(view, "POLL_S", 0.01)
    monkeypatch.setattr(view, "SHARE", 0)
    ready = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        task = asyncio.create_task(ReportView(report).serve(listener, ready.set))
        try:
            await asyncio.wait_for(ready.wait(), 10)
            yield f"http://127.0.0.1:{port}", port
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.done()


class Events:
    """The stream of a view, put together as page.js does it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.id = ""
        self.title = ""
        self.keys: list[str] = []
        self.parts: dict[str, Any] = {}
        self.last: dict[str, Any] = {}

    async def next(self) -> None:
        """Take one event."""
        while (
            read := await asyncio.wait_for(self._response.content.readuntil(b"\n", max_size=1 << 27), 20)
        ) != b"\n":
            name, _, value = read.decode().rstrip("\n").partition(": ")
            if name == "id":
                self.id = value
            else:
                assert name == "data"
                self.last = json.loads(value)
        self.title = self.last["title"]
        self.keys = self.last.get("keys", self.keys)
        self.parts |= self.last["parts"]

    async def until(self, done: int) -> None:
        """Take events until so many rollouts are there."""
        while self.done < done:
            await self.next()

    @property
    def done(self) -> int:
        progress = [part["progress"] for part in self.parts.values() if "progress" in part]
        return progress[0]["done"] if progress else 0


async def test_a_browser_is_sent_all_and_then_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = GrowingReport(tmp_path / "run")
    async with served(report, monkeypatch) as (url, _), aiohttp.ClientSession() as http:
        async with http.get(f"{url}/events") as response:
            assert response.content_type == "text/event-stream"
            events = Events(response)
            await events.next()
            assert [*events.parts.values()] == [
                {"note": f"Waiting for the first rollout of {tmp_path / 'run'}."}
            ]
            run = make_run(tmp_path / "run", 4)
            append(run, line(0, 0) + line(0, 1))
            await events.until(2)
            assert events.title == "m on e, 2023-11-14"
            assert {*events.keys} <= {*events.parts}
            append(run, line(0, 2, HOSTILE))
            await events.until(3)
            assert len([part for part in events.last["parts"].values() if "rollout" in part]) == 1
            assert not any("filters" in part for part in events.last["parts"].values())
            seen = events.id
        append(run, line(1, 0))
        async with http.get(f"{url}/events", params={"since": "", "x": "y"}) as response:
            whole = Events(response)
            await whole.until(4)
        async with http.get(f"{url}/events", headers={"Last-Event-ID": seen}) as response:
            again = Events(response)
            await again.until(4)
            assert len(again.last["parts"]) < len(whole.parts)
            assert {**events.parts, **again.parts} == {**events.parts, **whole.parts}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1", True),
        ("127.1.2.3:80", True),
        ("[::1]:80", True),
        ("", False),
        ("evil.example", False),
        ("localhost.evil.example:80", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("10.0.0.1", False),
        ("[::1", False),
        ("0.0.0.0", False),
    ],
)
def test_hosts(host: str, expected: bool) -> None:
    assert is_for_loopback(host) is expected


async def test_others_are_refused_and_no_file_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", 1)
    append(run, line(0, 0, HOSTILE))
    async with served(GrowingReport(run), monkeypatch) as (url, _), aiohttp.ClientSession() as http:
        async with http.get(url) as response:
            text = await response.text()
            assert response.status == 200
            assert "connect-src 'self'" in text
            assert "default-src 'none'" in text
            assert "access-control-allow-origin" not in response.headers
            assert HOSTILE not in text
        for path in ("/", "/events"):
            async with http.get(url + path, headers={"Host": "rebound.example"}) as response:
                assert response.status == 421
        for path in (
            "/run.json",
            "/rollouts.jsonl",
            "/../run.json",
            "/events/",
            "/favicon.ico",
            "//etc/passwd",
        ):
            async with http.get(url + path) as response:
                assert response.status == 404, path
        async with http.post(url, data=b"x") as response:
            assert response.status == 404


async def test_a_line_that_is_none_ends_it_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", 1)
    append(run, b"{torn\n")
    monkeypatch.setattr(view, "POLL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(DataError) as raised:
        await asyncio.wait_for(ReportView(GrowingReport(run)).serve(listener, lambda: None), 20)
    assert raised.value.line == 1


async def test_a_browser_that_does_not_read_costs_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change is of 400 kB; another browser gets each, and the one that sleeps gets what is there when it wakes up."""
    run = make_run(tmp_path / "run", 100)
    most = 0
    update = view.ReportView._publish

    def measured(self: ReportView, *arguments: Any) -> None:
        nonlocal most
        update(self, *arguments)
        most = max([most, *(transport.get_write_buffer_size() for transport in transports)])

    transports: list[asyncio.Transport] = []
    prepare = aiohttp.web.StreamResponse.prepare

    async def noted(self: aiohttp.web.StreamResponse, request: aiohttp.web.BaseRequest) -> Any:
        assert request.transport is not None
        transports.append(request.transport)
        return await prepare(self, request)

    monkeypatch.setattr(ReportView, "_publish", measured)
    monkeypatch.setattr(aiohttp.web.StreamResponse, "prepare", noted)
    async with served(GrowingReport(run, tasks=1000, per_task=100), monkeypatch) as (url, port):
        sleeper = socket.create_connection(("127.0.0.1", port))
        sleeper.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with aiohttp.ClientSession() as http, http.get(f"{url}/events") as response:
            events = Events(response)
            for key in range(40):
                texts = [{"role": "user", "content": "x" * 6000}] * 64
                result = {"responses_create_params": {"input": texts}}
                append(run, line(key, 0, result=result))
                await events.until(key + 1)
        assert len(json.dumps(events.parts)) > 15e6
        assert most < 2e6, "several versions of the page wait for a browser"
        with sleeper, sleeper.makefile("rb") as woken:
            lines = iter(woken.readline, b"")
            await asyncio.to_thread(lambda: next(line for line in lines if b'"done":40' in line))


@contextlib.contextmanager
def command(run: Path, *options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`gymgate view` as a process, and the URL that it prints."""
    environment = {**os.environ, **variables}
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        environment.pop(name, None)
    arguments = [sys.executable, "-m", "gymgate", "view", str(run), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url), process.stderr and process.stderr.read()
            yield process, url
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_ends_it_at_once_also_with_open_streams(tmp_path: Path, number: int) -> None:
    run = make_run(tmp_path / "run", 100)
    for key in range(20):
        append(
            run, line(key, 0, result={"responses_create_params": {"input": [{"content": "x" * 6000}] * 64}})
        )
    with command(run) as (process, url):
        port = int(url.rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as sleeper:
            sleeper.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with aiohttp.ClientSession() as http, http.get(f"{url}events") as response:
                await Events(response).until(20)
                with socket.create_connection(("127.0.0.1", port)) as scanner:
                    scanner.sendall(b"\x16\x03no request\r\n\r\n")
                    assert b" 400 " in await asyncio.to_thread(scanner.recv, 100)
                process.send_signal(number)
                out, err = await asyncio.to_thread(process.communicate, None, 10)
    assert process.returncode == 130
    assert (out, err) == ("", "")


def test_the_browser_is_told_the_url(tmp_path: Path) -> None:
    """`BROWSER` is a program that notes its argument; without a screen and without it, none is opened."""
    program, noted = tmp_path / "browser", tmp_path / "noted"
    os.mkfifo(noted)
    program.write_text(f'#!/bin/sh\necho "$1" > {noted}\n')
    program.chmod(0o755)
    with command(tmp_path / "run", BROWSER=f"{program} %s") as (_, url):
        assert noted.read_text() == f"{url}\n"
