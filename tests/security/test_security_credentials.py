"""Where a policy's and a judge's credentials must not be: another process's environment or arguments, or any file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from stack_support import ROW, call_then_answer, faulty, pids_of, stack_config

from gymgate.config import HTTPEndpoint, cache_dir
from gymgate.stack import Stack, acquire
from gymgate.stack.places import base_directory

pytestmark = pytest.mark.gym

POLICY_KEY = "canary-policy-5c1e0b6f"
JUDGE_KEY = "canary-judge-91b7d3aa"
CANARIES = (POLICY_KEY.encode(), JUDGE_KEY.encode())


class Endpoints:
    """A policy and a judge that want their keys."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.add(request.headers["Authorization"])
        body = json.loads(await request.read())
        return web.json_response(call_then_answer(body))


@pytest.fixture
async def endpoints() -> Iterator[tuple[Endpoints, str]]:
    serving = Endpoints()
    app = web.Application()
    app.router.add_post("/v1/responses", serving.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield serving, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def test_credentials_reach_their_endpoints_and_nothing_else(
    endpoints: tuple[Endpoints, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the daemon crashed: no core file, nothing in its logs."""
    serving, url = endpoints
    monkeypatch.setenv("THE_POLICY_KEY", POLICY_KEY)
    monkeypatch.setenv("THE_JUDGE_KEY", JUDGE_KEY)
    judge = HTTPEndpoint(base_url=url, dialect="responses", api_key_env="THE_JUDGE_KEY")
    policy = HTTPEndpoint(base_url=url, dialect="responses", api_key_env="THE_POLICY_KEY")
    state = tmp_path / "state"
    config = stack_config(
        faulty(tmp_path, fault="judge"), models={"judge_model": judge}, state_dir=str(state)
    )
    async with acquire(config) as stack:
        rollout = await stack.run(ROW, policy=policy)
        assert rollout.reward == 1.0, rollout.error
        assert serving.seen == {f"Bearer {POLICY_KEY}", f"Bearer {JUDGE_KEY}"}
        assert not any(canary in rollout.model_dump_json().encode() for canary in CANARIES)
        status = await stack.status()
        for pid in pids_of(status):
            for name in ("environ", "cmdline"):
                assert_clean(Path(f"/proc/{pid}/{name}"))
        assert_files_clean(state, cache_dir() / "run", cache_dir() / "gym")
        await crash(stack, status["pid"])
        assert_files_clean(state, cache_dir() / "run")
        assert not list_core_files()


async def crash(stack: Stack, daemon: int) -> None:
    """Abort the daemon, as a fault in native code would."""
    end = os.pidfd_open(daemon)
    os.kill(daemon, signal.SIGABRT)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(end, gone.set)
    await asyncio.wait_for(gone.wait(), 10)
    asyncio.get_running_loop().remove_reader(end)
    os.close(end)


def assert_clean(path: Path) -> None:
    content = path.read_bytes()
    assert not any(canary in content for canary in CANARIES), path


def assert_files_clean(*roots: Path) -> None:
    for root in roots:
        for path in root.rglob("*"):
            if ".git" in path.parts or ".mypy_cache" in path.parts or path.suffix in (".py", ".pyc"):
                continue
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26:
                assert_clean(path)


async def test_what_a_stack_makes_is_its_users_alone(tmp_path: Path) -> None:
    """Whatever the umask: sockets, logs, and the directories that they are in."""
    before = os.umask(0)
    try:
        async with acquire(stack_config(state_dir=str(tmp_path / "state"))) as stack:
            assert_private((await stack.status())["directory"])
    finally:
        os.umask(before)


def list_core_files() -> list[Path]:
    return [*Path.cwd().glob("core*"), *Path.cwd().glob("*.core")]


def assert_private(name: str) -> None:
    directory = Path(name)
    sockets = list(base_directory().rglob("*.sock"))
    assert sockets
    for path in (directory, *directory.rglob("*"), *sockets):
        assert is_private(path), path


def is_private(path: Path) -> bool:
    """Nobody else can open it: by its own mode, or by that of a directory above it."""
    return any(
        not stat.S_IMODE(each.lstat().st_mode) & 0o077 and each.owner() == path.owner()
        for each in (path, *path.parents[:6])
        if not each.is_symlink()
    )
