"""The Ray of a stack, which runs whatever code it is sent: for the stack's own servers alone."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from gymgate.gym.inside.forkserver import descendants
from gymgate.gym.runtime import clean_env, ensure_runtime
from gymgate.stack import acquire
from support.stacks import LOOPBACK, alive, listening, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(300)]

STRANGER = """
import os, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("ran as", ray.get(ray.remote(lambda: os.getpid()).remote()))
"""


async def stranger(python: Path, address: str, **variables: str) -> tuple[int | None, str]:
    """Somebody else's program that would have a Ray run something; its exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-c", STRANGER, address),
        env={**clean_env(()), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, said.decode()


async def test_a_ray_serves_its_stack_alone() -> None:
    """On loopback, with a token that others do not have, in files that they cannot open and that go with the stack."""
    config = stack_config("code_gen", start_timeout_s=200)
    async with acquire(config) as stack:
        status = await stack.status()
        pids = [status["pid"], *descendants(status["pid"])]
        assert set().union(*(listening(pid) for pid in pids if alive([pid]))) <= LOOPBACK
        (directory,) = Path("/tmp").glob(f"gym-ray-*-{status['pid']}-*")  # noqa: ASYNC240
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert list(directory.glob("r/session_*/sockets/raylet"))
        address = next(Path(status["directory"]).glob("ray-*.address")).read_text()  # noqa: ASYNC240
        environment = Path(f"/proc/{status['fork_servers'][0]}/environ").read_bytes().split(b"\0")  # noqa: ASYNC240
        token = next(part for part in environment if part.startswith(b"RAY_AUTH_TOKEN="))[15:].decode()
        python = (await asyncio.to_thread(ensure_runtime, config.runtime)).python
        for variables in (
            {"RAY_AUTH_MODE": "disabled"},
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64},
        ):
            code, said = await stranger(python, address, **variables)
            assert code != 0, said
            assert "ran as" not in said
        code, said = await stranger(python, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
        assert code == 0, said
        assert "ran as" in said
    assert not directory.exists()
