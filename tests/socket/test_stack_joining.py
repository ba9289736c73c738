"""A running stack is joined by the path of its socket, if it is what is asked for. None is started, and no path is removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, RayCluster, RuntimeConfig, StackConfig
from gymgate.core.errors import ConfigError, GymgateError, SetupError, StackLostError
from gymgate.stack import Stack, acquire, connect
from gymgate.stack.client import launch
from gymgate.stack.client.stack import Lease
from gymgate.stack.daemon.process import Daemon
from gymgate.stack.daemon.running_stack import RunningStack

JUDGE = HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="m", api_key="canary-key")
TWO = StackConfig(
    environments=("resources_servers/mcqa", EnvironmentConfig(name="reading", overrides={"a.b": 1})),
    models={"judge": JUDGE},
    agent_processes=2,
    share="machine",
)


class Held(Daemon):
    """A daemon whose stack starts at once, without servers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.starts: list[StackConfig] = []
        self.exits = contextlib.AsyncExitStack()

    async def _start_stack(self, config: StackConfig) -> RunningStack:
        self.starts.append(config)
        stack = RunningStack(config, self.directory, print)
        await self.exits.enter_async_context(stack.gateway)
        stack._names = {spec.name: spec.name.rpartition("/")[2] for spec in config.environments}
        settings = [
            {"name": stack._names[spec.name], "overrides": spec.overrides} for spec in config.environments
        ]
        stack._settings = {"nemo_gym": config.runtime.version, "environments": settings}
        for name in stack._names.values():
            environment: Any = SimpleNamespace(
                name=name, agents={}, row_targets=(), tasksets=(), describe=dict, middlewares=dict
            )
            stack.environments[name] = environment
        return stack


@asynccontextmanager
async def daemon_at(path: Path) -> AsyncIterator[Held]:
    """A daemon that nobody has said hello to. It has ended at the end of the block."""
    interrupt = signal.getsignal(signal.SIGINT)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        daemon = Held(listener, path, path.parent, os.getppid())
        serving = asyncio.create_task(daemon.serve())
        try:
            yield daemon
        finally:
            daemon.retire()
            await serving
            for holder in [*daemon.leases]:
                holder.peer.abort()
                await holder.peer.lost.wait()
            await daemon.exits.aclose()
            signal.signal(signal.SIGINT, interrupt)


@asynccontextmanager
async def held_at(path: Path, config: StackConfig = TWO) -> AsyncIterator[Held]:
    """A daemon with a stack and one lease."""
    async with daemon_at(path) as daemon:
        holder = Lease(lambda: "gone", None)
        await asyncio.get_running_loop().create_unix_connection(lambda: holder.peer, str(path))
        await holder.hello(config)
        yield daemon
        holder.peer.abort()
        await holder.peer.lost.wait()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stack's socket is. Whoever starts a process fails the test."""

    def start(*words: Any, **_: Any) -> Any:
        raise AssertionError(f"{words} was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    return tmp_path / "far.sock"


def joining(path: Path, *environments: Any, **fields: Any) -> StackConfig:
    return StackConfig(environments=environments or ("mcqa",), server=str(path), **fields)


async def refusal(config: StackConfig) -> GymgateError:
    """The error of a stack that cannot be joined, whose text is one line."""
    with pytest.raises(GymgateError) as raised:
        async with acquire(config):
            pass
    assert "\n" not in str(raised.value)
    return raised.value


def refused(config: StackConfig) -> GymgateError:
    return asyncio.run(refusal(config))


@pytest.mark.parametrize("asked", ["mcqa", "resources_servers/mcqa"])
async def test_a_stack_is_joined_for_one_of_its_environments(path: Path, asked: str) -> None:
    """By its name or as the stack's own config has it. It goes on when the joined lease is given back."""
    async with held_at(path) as daemon:
        async with acquire(joining(path, asked)) as stack:
            assert (await stack.status())["leases"] == 2
            assert stack.names == {asked: "mcqa"}
            names = [each["name"] for each in stack.description["settings"]["environments"]]
            assert names == ["mcqa"]
        assert not daemon.is_retired
        assert daemon.starts == [TWO]


async def test_a_path_may_begin_at_the_users_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(path.parent))
    async with held_at(path), acquire(joining(Path("~") / path.name)) as stack:
        assert (await stack.status())["leases"] == 2


async def test_what_is_asked_for_may_be_said_if_it_is_so(path: Path) -> None:
    async with held_at(path) as daemon:
        same = TWO.model_copy(update={"server": str(path), "share": "process"})
        async with acquire(same) as stack:
            assert [*stack.names.values()] == ["mcqa", "reading"]
            assert len(stack.description["settings"]["environments"]) == 2
        assert daemon.starts == [TWO]


async def test_rows_go_to_the_only_environment_that_was_asked_for(path: Path) -> None:
    """Else the row, or who runs it, has to say where it goes."""
    row, policy = {"responses_create_params": {"input": "hi"}}, JUDGE

    async def chosen(stack: Stack, **fields: Any) -> str:
        with pytest.raises(ConfigError) as raised:  # there is no agent
            await stack.run({**row, "agent_ref": {"name": "none"}}, policy=policy, **fields)
        return str(raised.value)

    async with held_at(path):
        async with acquire(joining(path, "reading")) as stack:
            assert "'reading'" in await chosen(stack)
        async with acquire(joining(path, "mcqa", "reading")) as stack:
            assert "this stack" in await chosen(stack)
            assert "'mcqa'" in await chosen(stack, environment="mcqa")


async def test_an_environment_that_the_stack_has_not_is_refused(path: Path) -> None:
    async with held_at(path) as daemon:
        error = await refusal(joining(path, "mcqa", "gpqa_diamond"))
        assert isinstance(error, ConfigError)
        assert "'gpqa_diamond'" in str(error)
        assert "mcqa, reading" in str(error)
        assert (daemon.starts, len(daemon.leases)) == ([TWO], 1)


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("mcqa.overrides", {"environments": [EnvironmentConfig(name="mcqa", overrides={"a.b": 1})]}),
        ("reading.overrides", {"environments": [EnvironmentConfig(name="reading", overrides={"a.b": 2})]}),
        ("mcqa.agent: None there, 'x' here", {"environments": [EnvironmentConfig(name="mcqa", agent="x")]}),
        ("runtime.version: '0.7.0' there, '0.6.0' here", {"runtime": RuntimeConfig(version="0.6.0")}),
        (
            "runtime.interpreter: None there, '/bin/sh' here",
            {"runtime": RuntimeConfig(interpreter="/bin/sh")},
        ),
        ("agent_processes: 2 there, 3 here", {"agent_processes": 3}),
        ("models", {"models": {"judge": JUDGE.model_copy(update={"model": "other"})}}),
        ("models", {"models": {"judge": "policy"}}),
        ("env_vars", {"env_vars": ("HOME",)}),
        ("ray", {"ray": RayCluster("auto")}),
    ],
)
async def test_other_settings_are_refused_by_name(path: Path, named: str, fields: dict[str, Any]) -> None:
    async with held_at(path) as daemon:
        error = await refusal(joining(path, *fields.pop("environments", ()), **fields))
        assert isinstance(error, ConfigError)
        assert named in str(error)
        assert not any(secret in str(error) for secret in ("canary", JUDGE.base_url))
        assert (daemon.starts, len(daemon.leases)) == ([TWO], 1)


async def test_a_stack_of_another_release_is_refused_though_none_is_named(path: Path) -> None:
    """The rows are those of this process's release."""
    old = TWO.model_copy(update={"runtime": RuntimeConfig(version="0.6.0")})
    async with held_at(path, old):
        assert "runtime.version: '0.6.0' there, '0.7.0' here" in str(await refusal(joining(path)))
        async with acquire(joining(path, runtime=RuntimeConfig(version="0.6.0"))):
            pass


async def test_who_joins_starts_no_stack(path: Path) -> None:
    """Also where a daemon waits for the first hello, which says what is started."""
    async with daemon_at(path) as daemon:
        with socket.socket(socket.AF_UNIX) as starter:
            starter.connect(str(path))
            assert isinstance(await refusal(joining(path)), StackLostError)
        assert daemon.starts == []


async def test_judges_of_a_joined_stack_are_its_own(path: Path) -> None:
    async with held_at(path) as daemon, acquire(joining(path)):
        assert [holder._judges for holder in daemon.leases] == [{"judge": JUDGE}] * 2


def test_a_path_that_leads_nowhere(path: Path) -> None:
    assert isinstance(refused(joining(path)), StackLostError)
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert isinstance(refused(joining(path)), StackLostError)
    assert path.is_socket(), "another process may be about to listen there"


def test_a_path_that_is_no_socket(path: Path) -> None:
    path.write_text("mine")
    assert isinstance(refused(joining(path)), ConfigError)
    assert path.read_text() == "mine"
    assert isinstance(refused(joining(path.parent)), ConfigError)
    assert isinstance(refused(joining(path.parent / ("x" * 200))), StackLostError)
    (long := path.parent / ("x" * 60) / ("y" * 60)).mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(long):
        listener.bind("s")
        assert isinstance(refused(joining(long / "s")), ConfigError)


async def test_another_users_socket_gets_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with held_at(path) as daemon:
        monkeypatch.setattr(launch.os, "getuid", lambda: 12345)
        assert isinstance(await refusal(joining(path)), SetupError)
        monkeypatch.undo()
        assert len(daemon.leases) == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x02\0\0\0\0\0\0\0[]"])
async def test_another_program_at_the_socket(path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, path), asyncio.timeout(30):
        assert isinstance(await refusal(joining(path)), StackLostError)


async def test_a_daemon_that_ends_is_a_lost_stack(path: Path) -> None:
    """Its path is left to whoever comes next, and who reconnects joins that one."""
    config = joining(path)
    async with held_at(path) as daemon:
        plain, again = await connect(config), await connect(config, reconnect=True)
        daemon.retire()
    for stack in (plain, again):
        await stack._last.peer.lost.wait()
        with pytest.raises(StackLostError) as raised:
            await stack.status()
        assert str(path) in str(raised.value)
    async with held_at(path):
        with pytest.raises(StackLostError):
            await plain.status()
        assert (await again.status())["leases"] == 2
        await plain.close()
        await again.close()
    assert not path.exists()  # noqa: ASYNC240
