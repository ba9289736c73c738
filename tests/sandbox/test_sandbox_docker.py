"""Real stacks whose rollouts run in Docker containers: what is scored, what is not, and when the containers are gone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner

from gymgate import acquire, acquire_sync
from gymgate.cli import cli
from gymgate.core.config import EnvironmentConfig, RolloutLimits, StackConfig
from gymgate.gym.inside.forkserver import rollout_label
from gymgate.gym.runtime import containers as found_containers
from gymgate.gym.runtime.owners import pid_namespace_id
from gymgate.stack.client.stack import Stack
from gymgate.stack.container_removal import Containers
from support.namespaces import elsewhere
from support.sandboxes import GIVE_UP, ROWS, SOLVE, containers, fix_repo, follows, no_containers, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.timeout(300)]

SLOW = ("sleep 300",)
QUIET_S = 7.0
"""After so long the remover has looked several times for containers of a rollout that ended, and found none."""
IMAGE_OF = "fix_repo.resources_servers.fix_repo.sandbox_spec.image"
NETWORK = "sandbox.docker.create.network"


def in_docker(image: str, *settings: tuple[str, Any]) -> EnvironmentConfig:
    return fix_repo("docker", (IMAGE_OF, image), (NETWORK, "none"), *settings)


@pytest.fixture(scope="module")
def shared(docker: str) -> Iterator[StackConfig]:
    """Of a stack that is up: each test has a lease of its own on it."""
    config = stack_config(in_docker(docker))
    with acquire_sync(config):
        yield config


@pytest_asyncio.fixture
async def stack(shared: StackConfig) -> AsyncIterator[Stack]:
    async with acquire(shared) as stack:
        yield stack
    assert await no_containers() is not None


async def test_a_repository_is_repaired_in_a_container_of_its_own(stack: Stack) -> None:
    outputs: list[str] = []
    solved = await stack.run(ROWS[0], policy=follows(SOLVE, outputs))
    given_up = await stack.run(ROWS[0], policy=follows(GIVE_UP))
    assert (solved.status, solved.reward) == ("completed", 1.0)
    assert (given_up.status, given_up.reward) == ("completed", 0.0)
    assert os.uname().nodename not in outputs[3]
    assert containers() == []


@pytest.mark.heavy  # eight at once, with one cancelled, are in the test lane below
async def test_twenty_rollouts_each_have_a_container(stack: Stack) -> None:
    """Half of them repair the repository; each sees its own files only."""
    outputs: list[list[str]] = [[] for _ in range(20)]
    work = [
        stack.run(ROWS[0], policy=follows(GIVE_UP if number % 2 else SOLVE, seen))
        for number, seen in enumerate(outputs)
    ]
    rollouts = await asyncio.gather(*work)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0] * 10
    assert len({seen[3] for seen in outputs[::2]}) == 10


async def test_a_missing_image_fails_and_is_never_a_score(docker: str) -> None:
    async with acquire(stack_config(in_docker("gymgate-has-no-such-image"))) as stack:
        rollout = await stack.run(ROWS[0], policy=follows(SOLVE))
    assert docker
    assert (rollout.status, rollout.reward) == ("failed", None)
    assert rollout.error is not None
    assert "gymgate-has-no-such-image" in rollout.error.message


async def test_a_container_that_died_is_no_score(stack: Stack) -> None:
    policy = follows(["touch here", "ls", "ls"])

    async def removing(body: dict[str, Any]) -> dict[str, Any]:
        if any(message["role"] == "tool" for message in body["messages"]):
            await asyncio.to_thread(subprocess.run, ["docker", "rm", "-f", *containers()], check=True)
        return await policy(body)

    rollout = await stack.run(ROWS[0], policy=removing)
    assert rollout.status in ("failed", "masked")
    assert rollout.status == "failed" or rollout.result["failure_kind"] == "sandbox_error"


async def begun(stack: Stack, others: Collection[str] = (), **fields: Any) -> asyncio.Task[Any]:
    """A rollout whose container, one beside the others, sleeps for five minutes."""
    task = asyncio.create_task(stack.run(ROWS[0], policy=follows(SLOW), **fields))
    while not {*await asyncio.to_thread(containers)} - {*others}:
        assert not task.done(), task.result()
        await asyncio.sleep(0.05)
    return task


async def held(stack: Stack, count: int, goes_on: asyncio.Event) -> tuple[list[asyncio.Task[Any]], list[str]]:
    """Rollouts that repair the repository once `goes_on` is set, and the container of each."""
    outputs: list[list[str]] = [[] for _ in range(count)]
    policies = [follows(("hostname", *SOLVE), seen, goes_on) for seen in outputs]
    tasks = [asyncio.create_task(stack.run(ROWS[0], policy=policy)) for policy in policies]
    while not all(outputs):
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.05)
    found = await asyncio.to_thread(containers)
    return tasks, [next(name for name in found if name in seen[0]) for seen in outputs]


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.heavy)])
async def test_a_cancelled_rollouts_container_goes_and_the_others_stay(stack: Stack, count: int) -> None:
    goes_on = asyncio.Event()
    (cancelled, *tasks), (_, *others) = await held(stack, count, goes_on)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await no_containers(but=others) is not None
    assert sorted(await asyncio.to_thread(containers)) == sorted(others)
    goes_on.set()
    assert [rollout.reward for rollout in await asyncio.gather(*tasks)] == [1.0] * (count - 1)


async def test_containers_are_gone_after_a_deadline_while_another_stays(stack: Stack) -> None:
    goes_on = asyncio.Event()
    (other,), names = await held(stack, 1, goes_on)
    task = await begun(stack, names, limits=RolloutLimits(timeout_s=8))
    assert (await task).error.kind == "timeout"
    assert await no_containers(but=names) is not None
    goes_on.set()
    assert (await other).reward == 1.0


@pytest.mark.heavy  # goes the way of the deadline above
async def test_containers_are_gone_after_a_policy_failed_while_another_stays(stack: Stack) -> None:
    """The agent gives up then, and nobody asks the resources server to end the container."""
    goes_on = asyncio.Event()
    (other,), names = await held(stack, 1, goes_on)

    async def failing(body: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no model")

    rollout = await stack.run(ROWS[0], policy=failing)
    assert (rollout.status, rollout.reward) == ("failed", None)
    assert await no_containers(but=names) is not None
    goes_on.set()
    assert (await other).reward == 1.0


def started(image: str, labels: dict[str, str]) -> str:
    words = [word for each in labels.items() for word in ("--label", "=".join(each))]
    command = ["docker", "run", "-d", "--network", "none", *words, image, "sleep", "100"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return made.stdout.strip()[:12]


@pytest_asyncio.fixture
async def remover(docker: str) -> AsyncIterator[Containers]:
    found = Containers()
    yield found
    found.close()
    assert found._remover is not None
    await asyncio.to_thread(found._remover.wait, 60)


async def test_a_container_that_appears_after_its_rollout_is_removed(
    docker: str, remover: Containers
) -> None:
    """`docker run` may pull its image for minutes after the rollout was cancelled."""
    labels = remover.new_labels()
    remover.remove_of_rollout("0" * 32)
    await asyncio.sleep(QUIET_S)
    rollout = {found_containers.ROLLOUT: rollout_label("0" * 32), "nemo-gym.sandbox": "1"}
    await asyncio.to_thread(started, docker, labels | rollout)
    assert await no_containers() is not None


@pytest.mark.parametrize("server", ["fix_repo", "fix_repo_simple_agent"])
async def test_containers_are_gone_after_a_server_was_killed(stack: Stack, server: str) -> None:
    task = await begun(stack)
    (environment,) = (await stack.status())["environments"].values()
    os.kill(environment["servers"][server]["pid"], signal.SIGKILL)
    assert (await task).status == "failed"
    assert await no_containers() is not None
    assert (await stack.run(ROWS[0], policy=follows(SOLVE))).reward == 1.0


async def test_containers_are_gone_after_the_daemon_was_killed(docker: str) -> None:
    own = stack_config(in_docker(docker), max_restarts=1)  # not the shared one
    async with acquire(own) as stack:
        task = await begun(stack)
        os.kill((await stack.status())["pid"], signal.SIGKILL)
        await asyncio.wait([task])
        assert await no_containers() is not None


async def test_containers_are_gone_after_the_sdk_process_was_killed(docker: str) -> None:
    here = [str(Path(__file__).parents[n]) for n in (0, 1)]
    program = (
        f"import sys, asyncio; sys.path[:0] = {here!r}\n"
        "from test_sandbox_docker import *\n"
        "async def main():\n"
        f"    async with acquire(stack_config(in_docker({docker!r}))) as stack:\n"
        "        await (await begun(stack))\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    while not await asyncio.to_thread(containers):
        assert process.returncode is None
        await asyncio.sleep(0.1)
    process.kill()
    await process.wait()
    assert await no_containers() is not None


def test_leftovers_are_found_and_cleaned(
    docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers whose daemon is gone. Those of a daemon that runs stay, and those of one that cannot be seen from here."""
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path))
    labels, ids = found_containers.labels_of("s", "s.1"), {}
    processes = {
        "dead": f"{pid_namespace_id()}-4194304",
        "live": labels[found_containers.PROCESS],
        "far": "a2345678-1",
    }
    try:
        for name, process in processes.items():
            ids[name] = started(docker, labels | {found_containers.PROCESS: process})
        told = elsewhere("from gymgate.cli import main; main(['cache', 'clean'])")
        assert ("removed container" in told, "docker rm -f" in told) == (False, True)
        left = {each.id: each.is_certain for each in found_containers.leftovers()}
        assert [left.get(ids[name]) for name in processes] == [True, None, False]
        dry = CliRunner().invoke(cli, ["cache", "clean", "--dry-run"])
        assert re.search(f"would remove .*{ids['dead']}", dry.output)
        cleaned = CliRunner().invoke(cli, ["cache", "clean"])
        assert f"removed container {ids['dead']}" in cleaned.output
        left = {each.id: each.is_certain for each in found_containers.leftovers()}
        assert [left.get(ids[name]) for name in processes] == [None, None, False]
        there = subprocess.run(["docker", "ps", "-q"], capture_output=True, text=True, check=True).stdout
        assert [each for each in ids.values() if each in there.split()] == [ids["live"], ids["far"]]
    finally:
        subprocess.run(["docker", "rm", "-f", *ids.values()], capture_output=True, check=False)
