"""A machine that lacks things: descriptors, disk, a cache to write to, shared memory, a steady clock, quiet."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import RolloutLimits, cache_dir
from gymgate.gateway.serving_process import FEW_FILES_PER_ROLLOUT, FILES_PER_ROLLOUT, max_rollouts
from gymgate.gym.runtime import ensure_runtime
from gymgate.rollouts import Rollout
from gymgate.stack import acquire
from support.agents import TOOLS, StampingPolicy, environment_with_forgetful_agent, stamped_row
from support.ledger import Program, program
from support.stacks import ROW, SIMPLE, call_then_answer, pids_of, runtime, server_pid, stack_config

pytestmark = pytest.mark.gym

NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
ROLLOUTS = """
options = dict(word.split("=", 1) for word in sys.argv[1:])
seen = options.get("seen", "").split()
config = stack_config(state_dir=options.get("state") or None, start_timeout_s=60, env_vars=seen)

async def main():
    async with acquire(config) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        status = await stack.status()
        say("up", status["pid"], *status["fork_servers"])
        if options.get("pause"):
            await asyncio.to_thread(sys.stdin.readline)
        count = int(options.get("count", "8"))
        limits = RolloutLimits(timeout_s=float(options.get("timeout", "20")))
        rollouts = await asyncio.gather(*(stack.run(ROW, policy=policy, limits=limits) for _ in range(count)))
        bad = [rollout for rollout in rollouts if rollout.reward != 1.0]
        assert all(rollout.error is not None for rollout in bad), bad
        say("failed", len(bad), {rollout.error.type for rollout in bad} or "")
        after = await stack.run(ROW, policy=policy, limits=limits)
        say("after", after.reward, after.error or "")
        assert (await stack.status())["rollouts"] == 0

try:
    asyncio.run(main())
except GymgateError as error:
    say("error", type(error).__name__, error.message)
"""


def mounting(script: str) -> list[str]:
    """A command's prefix: in a mount namespace of its own, after this script; skips where that is not allowed."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    command = [*NAMESPACE, "sh", "-euc", script + '\nexec "$@"', "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=20, check=False)
    if tried.returncode:
        pytest.skip(f"no mounts may be made here: {tried.stderr.strip()}")
    return command


async def all_well(sdk: Program, seconds: float = 60.0) -> None:
    """The program's rollouts, and the one after them, get their reward."""
    assert await sdk.until_line("failed", seconds) == "failed 0"
    assert (await sdk.line()).startswith("after 1.0")
    assert await sdk.ended(15) == 0


async def test_256_descriptors() -> None:
    """More rollouts at once than there are descriptors: as many run as have them, and none fails."""
    few = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
    async with program(ROLLOUTS, "count=200", "timeout=90", wrap=few) as sdk:
        await all_well(sdk, 100)


@pytest.mark.parametrize(("stock", "most_files"), [(True, FILES_PER_ROLLOUT), (False, FEW_FILES_PER_ROLLOUT)])
async def test_a_rollout_holds_no_more_descriptors_than_are_reckoned_for_it(
    stock: bool, most_files: int
) -> None:
    """All call their tool at once, and end at once, so that none uses another's connection."""
    count, rounds = 40, [asyncio.Event(), asyncio.Event()]
    waiting = [0, 0]

    async def policy(body: dict[str, Any]) -> dict[str, Any]:
        number = int(any(item.get("type") == "function_call_output" for item in body["input"]))
        waiting[number] += 1
        if waiting[number] == count:
            rounds[number].set()
        await rounds[number].wait()
        return call_then_answer(body)

    async with acquire(stack_config(stock_servers=stock)) as stack:
        assert stack.description["max_rollouts"] == max_rollouts(most_files)
        status = await stack.status()
        pids = {*pids_of(status), os.getpid()}
        before = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}  # noqa: PTH208
        most = dict(before)
        endpoint = stack.register("policy", policy, dialect="responses")
        tasks = [asyncio.create_task(stack.run(ROW, policy=endpoint)) for _ in range(count)]
        while (await asyncio.wait(tasks, timeout=0.02))[1]:
            for pid in pids:
                most[pid] = max(most[pid], len(os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208
        assert {task.result().reward for task in tasks} == {1.0}
    held = max(most[pid] - before[pid] for pid in pids) / count
    assert most_files - 1 < held <= most_files


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_2048_rollouts_with_1024_descriptors_and_a_daemon_that_is_blocked() -> None:
    """It stands still for a second as they come: they wait for it and for descriptors, and none fails."""
    few = ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh"]
    async with program(ROLLOUTS, "count=2048", "timeout=800", "pause=1", wrap=few) as sdk:
        daemon = int((await sdk.until_line("up")).split()[1])
        os.kill(daemon, signal.SIGSTOP)
        assert sdk.process.stdin is not None
        sdk.process.stdin.write(b"\n")
        await asyncio.sleep(1)
        os.kill(daemon, signal.SIGCONT)
        await all_well(sdk, 850)


@pytest.mark.parametrize("process", ["daemon", "fork server", "agent"])
async def test_no_file_may_be_opened(tmp_path: Path, process: str) -> None:
    """By the daemon, the fork server or an agent's server, in every wait of a rollout: each one ends in time with its reward or
    a typed error, and all is well when files may be opened again."""
    limits = RolloutLimits(timeout_s=4)
    config = stack_config(
        SIMPLE,
        environment_with_forgetful_agent(tmp_path),
        agent_processes=1,
        restart_window_s=1,
        max_restarts=20,
    )
    async with acquire(config) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        stamping = stack.register("stamping", StampingPolicy(1, TOOLS))
        status = await stack.status()
        agent = server_pid(status, SIMPLE, "example_single_tool_call_simple_agent")
        pid = {"daemon": status["pid"], "fork server": status["fork_servers"][0], "agent": agent}[process]

        async def run(own_process: bool) -> Rollout:
            row, endpoint = (stamped_row(1), stamping) if own_process else (ROW, policy)
            environment = config.environments[own_process].name
            async with asyncio.timeout(limits.timeout_s + 2):
                return await stack.run(row, policy=endpoint, environment=environment, limits=limits)

        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        for spare in (0, 3):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + spare, hard))
            rollouts = await asyncio.gather(*(run(own_process=number % 2 == 1) for number in range(8)))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
            for rollout in rollouts:
                assert (rollout.error is None) == (rollout.reward == 1.0), rollout
        for own_process in (False, True):
            async with asyncio.timeout(60):
                while (await run(own_process)).reward != 1.0:
                    pass


async def test_logs_on_a_full_disk(tmp_path: Path) -> None:
    """Nothing is logged any more, and nothing else is lost."""
    mount = mounting(f"mount -t tmpfs -o size=2m none {tmp_path}")
    async with program(ROLLOUTS, f"state={tmp_path}", "pause=1", wrap=mount) as sdk:
        await sdk.until_line("up")
        full = Path(f"/proc/{sdk.pid}/root{tmp_path}/full")
        with pytest.raises(OSError, match="No space left"):
            full.write_bytes(bytes(4 << 20))  # noqa: ASYNC240
        assert sdk.process.stdin is not None
        sdk.process.stdin.write(b"\n")
        await all_well(sdk)


async def test_a_start_on_a_full_disk_says_so(tmp_path: Path) -> None:
    fill = f"mount -t tmpfs -o size=64k none {tmp_path}; dd if=/dev/zero of={tmp_path}/full bs=4k 2>/dev/null || true"
    async with program(ROLLOUTS, f"state={tmp_path}", wrap=mounting(fill)) as sdk:
        line = await sdk.until_line("error")
        assert "No space left on device" in line, line
        assert await sdk.ended(15) == 0


async def test_directories_that_are_tidied_away(tmp_path: Path) -> None:
    """As temporary and runtime directories are: what is restarted makes its own again."""
    async with acquire(stack_config(state_dir=str(tmp_path))) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        for victim in (SIMPLE, "fork server", "blocked"):
            status = await stack.status()
            shutil.rmtree(status["directory"])
            if victim == "blocked":
                Path(status["directory"]).write_text("no directory any more")  # noqa: ASYNC240
            pid = server_pid(status, SIMPLE, SIMPLE) if victim == SIMPLE else status["fork_servers"][0]
            os.kill(pid, signal.SIGKILL)
            while (await stack.status())["environments"][SIMPLE]["state"] == "up":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            rollout = await asyncio.wait_for(stack.run(ROW, policy=policy), 30)
            if victim == "blocked":
                assert rollout.error is not None
                assert rollout.error.type == "ServerDiedError"
                assert "File exists" in rollout.error.message or "Not a directory" in rollout.error.message
            else:
                assert rollout.reward == 1.0, rollout.error


async def test_a_read_only_cache_and_no_shared_memory() -> None:
    """With the runtime in the cache, nothing needs to be written to either."""
    ensure_runtime(runtime())
    cache = f"mount --bind {cache_dir()} {cache_dir()}; mount -o remount,ro,bind {cache_dir()}"
    shared_memory = "mount -t tmpfs -o ro,size=4k none /dev/shm"
    async with program(ROLLOUTS, wrap=mounting(f"{cache}; {shared_memory}")) as sdk:
        await all_well(sdk)


JUMPING = """
import itertools, os, pathlib, time
(pathlib.Path(__file__).parent / str(os.getpid())).touch()
real, jumps = time.time, itertools.cycle((0.0, 86400.0 * 400, -86400.0 * 4000))
time.time = lambda: real() + next(jumps)
"""


async def test_a_clock_that_jumps(tmp_path: Path) -> None:
    """In the SDK process, the daemon, and NeMo Gym's servers, which are the fork server's children: deadlines are counted on
    the monotonic clock."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    code = "assert abs(time.time() - time.time()) > 86400\n"
    async with program(
        code + ROLLOUTS, "seen=PYTHONPATH", quiet=False, PYTHONPATH_FIRST=str(tmp_path)
    ) as sdk:
        _, *pids = (await sdk.until_line("up")).split()
        assert len(pids) == 2
        assert all((tmp_path / pid).exists() for pid in (*pids, str(sdk.pid)))
        await all_well(sdk)


COLD = """
config = stack_config(share="machine", state_dir=sys.argv[1])

async def main():
    sys.stdin.readline()
    async with acquire(config) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        rollout = await stack.run(ROW, policy=policy)
        say("reward", rollout.reward, (await stack.status())["pid"])
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_twenty_processes_at_once_with_a_cold_cache(tmp_path: Path) -> None:
    """One makes the runtime and the stack, and all run on it."""
    async with AsyncExitStack() as exits:
        programs = [
            await exits.enter_async_context(
                program(COLD, tmp_path, GYMGATE_CACHE=str(tmp_path / "cache"), quiet=False)
            )
            for _ in range(20)
        ]
        for sdk in programs:
            assert sdk.process.stdin is not None
            sdk.process.stdin.write(b"\n")
        lines = await asyncio.gather(*(sdk.until_line("reward", 800) for sdk in programs))
        assert len(set(lines)) == 1
        assert lines[0].startswith("reward 1.0"), lines[0]
        for sdk in programs:
            assert sdk.process.stdin is not None
            sdk.process.stdin.write(b"\n")
            assert await sdk.ended(30) == 0
    assert len(list((tmp_path / "cache" / "runtimes").glob("*/bin"))) == 1
