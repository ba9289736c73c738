"""Where a policy's and a judge's credentials must not be: another process's environment or arguments, or any file."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from gymgate.core.config import HTTPEndpoint, cache_dir
from gymgate.gym.inside.forkserver import descendants
from gymgate.gym.runtime.owners import owner
from gymgate.stack import Stack, acquire
from gymgate.stack.paths import base_directory
from support.faulty import faulty
from support.stacks import ROW, call_then_answer, pids_of, stack_config
from support.upstream import Seen, upstream

pytestmark = pytest.mark.gym

POLICY_KEY = "canary-policy-5c1e0b6f"
JUDGE_KEY = "canary-judge-91b7d3aa"
CANARIES = (POLICY_KEY.encode(), JUDGE_KEY.encode())


class Endpoints:
    """A policy and a judge that want their keys."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    async def answer(self, seen: Seen) -> web.Response:
        self.seen.add(seen.headers["Authorization"])
        return web.json_response(call_then_answer(seen.body))


@pytest.fixture
async def endpoints() -> Iterator[tuple[Endpoints, str]]:
    serving = Endpoints()
    async with upstream(serving.answer) as server:
        yield serving, server.url


async def test_credentials_reach_their_endpoints_and_nothing_else(
    endpoints: tuple[Endpoints, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the daemon crashed: no core file, nothing in its logs."""
    serving, url = endpoints
    allow_core_files()
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
        assert set(pids_of(status)) <= {status["pid"], *descendants(status["pid"])}
        for pid in (status["pid"], *descendants(status["pid"])):
            for name in ("environ", "cmdline"):
                assert_clean(Path(f"/proc/{pid}/{name}"))
            assert core_limit(pid) <= 1, "a core file would hold keys"
        (own,) = base_directory().glob(f"p-{owner()}-*")
        assert_files_clean(state, own, cache_dir() / "gym")
        await crash(stack, status["pid"])
        assert_files_clean(state, own)


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


@pytest.fixture
def open_to_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """Directories for a stack's files and for its sockets that anybody may enter, and a umask that hides nothing."""
    tmp_path.chmod(0o777)
    sockets = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    sockets.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    before = os.umask(0)
    yield [tmp_path, sockets]
    os.umask(before)
    shutil.rmtree(sockets)


async def test_what_a_stack_makes_is_its_users_alone(open_to_all: list[Path]) -> None:
    """Sockets, locks, logs, and what lies beside them."""
    state, sockets = open_to_all
    config = stack_config(state_dir=str(state / "state"), share="machine")
    async with acquire(config) as stack:
        rollout = await stack.run(ROW, policy=lambda body: {})
        assert rollout.error is not None
        assert {".log", ".sock", ".lock"} <= made_by_stack(state) | made_by_stack(sockets)


def made_by_stack(top: Path) -> set[str]:
    """The kinds of files below a directory, all of which are private."""
    found = [path for path in top.rglob("*") if not path.is_symlink()]
    for path in found:
        assert is_private(path, top), path
    return {path.suffix for path in found}


def allow_core_files() -> None:
    """As far as this machine does: the limit is inherited."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def core_limit(pid: int) -> float:
    """How many bytes of a core file a process may write; 1 also stops a handler that the kernel would pipe it to."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    soft = next(line for line in lines if line.startswith("Max core file size"))[26:].split()[0]
    return float("inf" if soft == "unlimited" else soft)


def is_private(path: Path, top: Path) -> bool:
    """Nobody else can open it: by its own mode, or by that of a directory between it and `top`, which anybody can enter."""
    own = [path, *path.parents]
    return any(
        not stat.S_IMODE(each.stat().st_mode) & 0o077 and each.owner() == Path.home().owner()
        for each in own[: own.index(top)]
    )
