"""What the doctor does where the model hub does not answer: one line within seconds, or the hub's cache."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest
from huggingface_hub import constants

from gymgate.core.errors import ConfigError
from gymgate.doctor import hub

MODEL = "some/model"
CLOSED = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path


def endpoint(monkeypatch: pytest.MonkeyPatch, status: int) -> HTTPServer:
    """A hub that answers everything with that status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    return server


def test_the_command_says_so_in_one_line_and_does_not_ask_again_and_again(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": CLOSED, "HF_HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "gymgate", "doctor", "--model", MODEL]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=25, check=False, env=environment
    )  # the hub's client, left to itself, takes more than a minute
    (line,) = [line for line in done.stdout.splitlines() if MODEL in line]
    assert (done.returncode, line[:13]) == (1, "FAILED policy")
    assert f" {CLOSED} " in line
    assert line.endswith("--model DIR")
    assert done.stderr == ""


@pytest.mark.parametrize(("status", "asked"), [(200, True), (401, True), (404, True), (503, False)])
def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch, status: int, asked: bool) -> None:
    server = endpoint(monkeypatch, status)
    try:
        if asked:
            with hub.hub_or_cache(MODEL) as unanswered:
                assert (unanswered, constants.HF_HUB_OFFLINE) == ("", False)
        else:
            with pytest.raises(ConfigError, match="HTTP 503"):
                hub.hub_or_cache(MODEL).__enter__()
    finally:
        server.shutdown()
        server.server_close()


def test_a_hub_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"nothing within 0\.2 s"):
            hub.hub_or_cache(MODEL).__enter__()
        failures: SimpleQueue[str | None] = SimpleQueue()
        asyncio.run(hub._ask(constants.ENDPOINT, failures))  # its own limit may end first
        assert failures.get() == "nothing within 0.2 s"


def test_what_the_cache_has_is_read_without_the_hub(monkeypatch: pytest.MonkeyPatch, no_cache: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    kept = no_cache / "models--some--model"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "snapshots" / "abc" / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    with hub.hub_or_cache(MODEL) as unanswered:
        assert constants.HF_HUB_OFFLINE
        assert f" {CLOSED} " in unanswered
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("model", [".", "/no/such/directory", "no name of a model"])
def test_the_hub_is_not_asked_for_what_it_cannot_have(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    with hub.hub_or_cache(model) as unanswered:
        assert (unanswered, constants.HF_HUB_OFFLINE) == ("", False)
