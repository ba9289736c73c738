"""The environment of every kind of process that gymgate starts, as a program in its place finds it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gymgate.cluster.servers import gpus_here
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, StackConfig
from gymgate.core.errors import GymgateError, StackStartError
from gymgate.gym.preparation import PrepareConfig
from gymgate.gym.preparation.order import program_env
from gymgate.gym.runtime import interpreters, venv
from gymgate.gym.runtime import npm as npm_programs
from gymgate.gym.runtime import uv as uv_program
from gymgate.gym.runtime.command import CommandError
from gymgate.gym.runtime.uv import UvFailedError, run_uv
from gymgate.quality import CheckRequest, parallel
from gymgate.stack import connect
from gymgate.stack.client import launch, leases
from gymgate.stack.client.launch import DaemonAddress
from gymgate.stack.daemon.forkserver_pool import ForkServerPool

KEYS = (
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "MY_SECRET",
)
REGISTRIES = {
    "UV_INDEX_MINE_PASSWORD": "u",
    "UV_DEFAULT_INDEX": "https://mine/simple",
    "NPM_CONFIG_REGISTRY": "https://mine/npm",
    "NPM_TOKEN": "n",
}
NAMED = ("JUDGE_KEY", "TAVILY_API_KEY")
PROGRAM = '#!/bin/sh\nenv -0 > "${0%/*}/environment"\n'

Starting = Callable[[Path], object]


def uv(program: Path) -> None:
    run_uv("pip", "install")


def npm(program: Path) -> None:
    npm_programs.install_package(str(program), "codex", "1", "codex", program.parent / "a")


def interpreter(program: Path) -> None:
    interpreters.find_interpreters(str(program))


def installed(program: Path) -> None:
    venv.inspect_runtime(program, ())


def daemon(program: Path) -> None:
    connection, process = launch._start(
        DaemonAddress(program.parent / "s.sock", program.parent / "made", NAMED)
    )
    with connection:
        process.wait(30)


def fork_server(program: Path) -> None:
    async def start() -> None:
        config = StackConfig(environments=("none",), env_vars=NAMED)
        await ForkServerPool(config, program.parent, print).client(program)

    asyncio.run(start())


def check(program: Path) -> None:
    judge = HTTPEndpoint(base_url="http://h/v1", api_key_env="JUDGE_KEY")
    request = CheckRequest.model_validate(
        {"environments": "x", "models": {"judge": judge}, "env_vars": ["TAVILY_API_KEY"]}
    )
    asyncio.run(parallel.check_in_process(request, lambda request, message: None))


def gpus(program: Path) -> None:
    program.rename(program.with_name("nvidia-smi"))
    gpus_here({})


STARTED: dict[Starting, tuple[set[str], set[str]]] = {
    uv: ({"UV_INDEX_MINE_PASSWORD", "UV_DEFAULT_INDEX"}, set()),
    npm: ({"NPM_CONFIG_REGISTRY", "NPM_TOKEN"}, set()),
    interpreter: ({"UV_DEFAULT_INDEX"}, set()),
    installed: (set(), set(REGISTRIES)),
    daemon: ({*REGISTRIES, *NAMED}, set()),
    fork_server: ({*NAMED}, set(REGISTRIES)),
    check: ({*REGISTRIES, *NAMED}, set()),
    gpus: (set(), set(REGISTRIES)),
}
"""With what has to be there, and what must not be, beside keys."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of every program: it writes down its environment, and fails its caller."""
    for name in (*KEYS, *NAMED):
        monkeypatch.setenv(name, "secret")
    for name, value in REGISTRIES.items():
        monkeypatch.setenv(name, value)
    with TemporaryDirectory(prefix="gc-", dir="/tmp") as directory:  # short enough for sockets
        path = Path(directory) / "program"
        path.write_text(PROGRAM)
        path.chmod(0o700)
        monkeypatch.setattr(uv_program, "find_uv", lambda: path)
        monkeypatch.setattr(sys, "executable", str(path))
        monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
        yield path


def dumped(program: Path) -> dict[str, str]:
    entries = (program.parent / "environment").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


@pytest.mark.parametrize("start", STARTED, ids=lambda start: start.__name__)
def test_no_key_reaches_a_process_that_was_not_given_it(start: Starting, program: Path) -> None:
    with contextlib.suppress(GymgateError, CommandError, UvFailedError, ValueError):
        start(program)
    found = dumped(program)
    wanted, unwanted = STARTED[start]
    assert found.keys().isdisjoint({*KEYS, *unwanted})
    assert wanted <= found.keys()
    assert "PATH" in found


def test_what_prepares_data_downloads_it_with_the_hubs_token_alone(program: Path) -> None:
    found = program_env(PrepareConfig(environment=EnvironmentConfig(name="x")))
    assert found["HF_TOKEN"] == "secret"
    assert found.keys().isdisjoint({*KEYS, *REGISTRIES} - {"HF_TOKEN"})


async def test_a_daemon_that_ends_before_it_answers_is_started_again_and_then_a_failed_start(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = launch._start

    def ended(address: DaemonAddress) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        connection, process = start(address)
        process.wait(30)
        started.append(process.pid)
        return connection, process

    monkeypatch.setattr(launch, "_start", ended)
    with pytest.raises(StackStartError, match="daemon is gone"):
        await connect(StackConfig(environments=(EnvironmentConfig(name="example_single_tool_call"),)))
    assert len(started) == leases.ATTEMPTS
