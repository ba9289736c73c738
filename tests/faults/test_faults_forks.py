"""The loaded fork server, forked again and again: every child runs, none hangs, and the fork server does not grow."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gymgate.gym.runtime import clean_env, ensure_runtime
from gymgate.stack.daemon.forkserver_client import ForkServerClient
from support.ledger import children
from support.stacks import runtime

pytestmark = pytest.mark.gym

AT_ONCE = 16
CHILD_S = 30.0
ENTRYPOINT = """
import asyncio, socket, ssl, threading
import numpy, uvloop
from nemo_gym.server_utils import get_global_config_dict

async def main():
    reader, writer = await asyncio.open_connection(*socket_pair_server.getsockname())
    writer.close()

found = []
threads = [threading.Thread(target=lambda: found.append(bytearray(1 << 20))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(10)
assert len(found) == 4
ssl.create_default_context()
socket.getaddrinfo("localhost", 80)
numpy.ones((64, 64)) @ numpy.ones((64, 64))
socket_pair_server = socket.create_server(("127.0.0.1", 0))
uvloop.run(main())
assert get_global_config_dict()["policy_model_name"] == "m"
print("random", numpy.random.random())
"""


def memory_kb(pid: int) -> int:
    """Written to by this process alone; of files' pages, which are its own when nobody else happens to map them, none."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def entries(pid: int, kind: str) -> int:
    return len(list(Path(f"/proc/{pid}/{kind}").iterdir()))


def numbers_of(directory: Path) -> set[str]:
    return {log.read_text().split("random")[1] for log in directory.glob("[0-9]*.log")}


async def forked(fork_server: ForkServerClient, number: int, directory: Path) -> None:
    log = directory / f"{number}.log"
    child = await fork_server.serve(
        str(number),
        log,
        directory=str(directory),
        entrypoint="app.py",
        instance="x",
        config={"policy_model_name": "m"},
        ray=False,
    )
    status = await asyncio.wait_for(asyncio.shield(child.exited), CHILD_S)
    assert status == 0, log.read_text()


async def stress(directory: Path, count: int) -> None:
    (directory / "app.py").write_text(ENTRYPOINT)
    python = ensure_runtime(runtime()).python
    fork_server = await ForkServerClient.start(python, {**clean_env(()), "PYTHONUNBUFFERED": "1"}, directory)
    try:
        pid = fork_server.process.pid
        await forked(fork_server, 0, directory)
        before = (memory_kb(pid), entries(pid, "fd"), entries(pid, "task"))
        assert before[2] == 1  # a fork copies one thread only
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with limit:
                await forked(fork_server, number, directory)

        async with asyncio.TaskGroup() as group:
            for number in range(1, count + 1):
                group.create_task(one(number))
        after = (memory_kb(pid), entries(pid, "fd"), entries(pid, "task"))
        print(count, "forks: private KB, fds, threads", before, "->", after)
        assert after[1:] == before[1:]
        assert after[0] < before[0] + 4096
        assert not children(pid)
    finally:
        await fork_server.close()
    assert len(numbers_of(directory)) == count + 1  # no two children draw the same


async def test_forty_forks(tmp_path: Path) -> None:
    await stress(tmp_path, 40)


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_a_thousand_forks(tmp_path: Path) -> None:
    await stress(tmp_path, 1000)
