"""A stack that is joined through a real SSH server, which listens on loopback for this test alone."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from gymgate.core.config import StackConfig
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.stack import SyncStack, acquire, acquire_sync, connect
from gymgate.stack.client.daemons import find_daemons
from gymgate.stack.ports import HeldPort
from support.stacks import ROW, call_then_answer, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.heavy]

SEPARATION = Path("/run/sshd")
"""Where root's sshd wants an empty directory."""


@dataclass(frozen=True)
class Server:
    """An SSH server of this user's, and what a client needs to enter it."""

    port: int
    directory: Path

    def client(self, *words: str) -> list[str]:
        """The command line of a client."""
        options = {
            "BatchMode": "yes",
            "ExitOnForwardFailure": "yes",
            "IdentitiesOnly": "yes",
            "IdentityFile": self.directory / "client",
            "ServerAliveInterval": 15,
            "StreamLocalBindUnlink": "yes",
            "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": self.directory / "known",
        }
        said = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-F", "none", *said, "-p", str(self.port), *words, f"{getpass.getuser()}@127.0.0.1"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("needs ssh and sshd (Debian: openssh-server)")
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(TemporaryDirectory(prefix="gs-", dir="/tmp")))
        if os.getuid() == 0 and not SEPARATION.exists():
            SEPARATION.mkdir(mode=0o755)
            exits.callback(SEPARATION.rmdir)
        for name in ("host", "client"):
            making = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
            subprocess.run(making, check=True, timeout=60)
        port = HeldPort()
        exits.callback(port.close)
        settings: dict[str, Any] = {
            "ListenAddress": f"127.0.0.1:{port.number}",
            "HostKey": directory / "host",
            "AuthorizedKeysFile": directory / "client.pub",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "UsePAM": "no",
            "StrictModes": "no",
            "PidFile": "none",
            "ClientAliveInterval": 15,
        }
        lines = [f"{name} {value}\n" for name, value in settings.items()]
        (directory / "sshd_config").write_text("".join(lines))
        process = exits.enter_context(
            subprocess.Popen(
                [program, "-D", "-e", "-f", str(directory / "sshd_config")], stderr=subprocess.PIPE, text=True
            )
        )
        exits.callback(process.terminate)
        assert process.stderr is not None
        for line in process.stderr:
            if "listening" in line:
                break
        else:
            pytest.fail("sshd ended")
        yield Server(port.number, directory)


@pytest.fixture(scope="module")
def held() -> Iterator[SyncStack]:
    with acquire_sync(stack_config(share="machine")) as stack:
        yield stack


@asynccontextmanager
async def forwarding(server: Server, held: SyncStack) -> AsyncIterator[tuple[Path, Any]]:
    """The path that leads to the held stack, and the client's process that forwards it."""
    daemon = find_daemons().choose((await status(held))["pid"])
    path = server.directory / "far.sock"
    words = server.client("-N", "-L", f"{path}:{daemon.command.socket_path}")
    process = await asyncio.create_subprocess_exec(*words)
    try:
        async with asyncio.timeout(60):
            while not is_listening(path):
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield path, process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def is_listening(path: Path) -> bool:
    """Whether a process listens at a socket, by the kernel's table: a connection would be forwarded."""
    return any(line.endswith(f" {path}") for line in Path("/proc/net/unix").read_text().splitlines())


async def status(held: SyncStack) -> dict[str, Any]:
    return await asyncio.to_thread(held.call, held.stack.status())


async def all_over(held: SyncStack) -> None:
    """Return when the held lease is the only one, and no rollout runs."""
    async with asyncio.timeout(30):
        while (now := await status(held))["leases"] > 1 or now["rollouts"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_stack_is_joined_through_ssh(server: Server, held: SyncStack) -> None:
    """Its rollouts call a function of this process. What else it is asked for is refused, and it goes on."""
    async with forwarding(server, held) as (path, _):
        async with acquire(stack_config(server=str(path))) as stack:
            policy = stack.register("scripted", call_then_answer, dialect="responses")
            rollouts = await asyncio.gather(*(stack.run(ROW, policy=policy) for _ in range(8)))
            assert [(rollout.error, rollout.reward) for rollout in rollouts] == [(None, 1.0)] * 8
            assert (await stack.status())["leases"] == 2
        for config, named in {
            StackConfig(environments=("gpqa_diamond",), server=str(path)): "'gpqa_diamond'",
            stack_config(server=str(path), linger_s=5): "linger_s",
        }.items():
            with pytest.raises(ConfigError, match=named):
                async with acquire(config):
                    pass
        await all_over(held)


async def test_an_ssh_that_ends_is_a_lost_stack(server: Server, held: SyncStack) -> None:
    """Its rollouts end there, and who reconnects joins again through the next one."""
    begun = asyncio.Event()

    async def hangs(body: dict[str, Any]) -> Any:
        begun.set()
        await asyncio.Event().wait()

    async with forwarding(server, held) as (path, process):
        stack = await connect(stack_config(server=str(path)), reconnect=True)
        running = asyncio.create_task(stack.run(ROW, policy=hangs))
        await begun.wait()
        process.terminate()
        with pytest.raises(StackLostError):
            await running
        await process.wait()
        await all_over(held)
        with pytest.raises(StackLostError):
            await stack.run(ROW, policy=hangs)
    async with forwarding(server, held):
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        assert (await stack.run(ROW, policy=policy)).reward == 1.0
        await stack.close()
    await all_over(held)
