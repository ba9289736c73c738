"""Stacks on the nodes of a real Ray cluster on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ray_nodes import add_node, ray_cluster
from pydantic import SecretStr

from gymgate import HTTPEndpoint, RayCluster, Rollout, RolloutLimits, Stack, StackStartError, acquire
from support.stacks import ROW, call_then_answer, stack_config

pytest.importorskip("ray", reason="needs Ray: run ./dev train")
pytestmark = [
    pytest.mark.gym,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@pytest.fixture
def cluster() -> Iterator[Any]:
    with ray_cluster(1, 1) as cluster:
        yield cluster


class Policy:
    """Answers in this process, once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting = 0

    async def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        self.waiting += 1
        await self.go.wait()
        return call_then_answer(body)


def run(stack: Stack, policy: Policy, count: int) -> list[asyncio.Task[Rollout]]:
    endpoint = stack.register("policy", policy, dialect="responses")
    return [asyncio.create_task(stack.run(ROW, policy=endpoint)) for _ in range(count)]


async def until_waiting(policy: Policy, count: int) -> None:
    async with asyncio.timeout(120):
        while policy.waiting < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_rollouts_spread_and_those_of_a_killed_node_run_again(cluster: Any) -> None:
    """Two raylets, one killed in the middle of calls: what it had fails, runs again on the other, and nothing else does. One that
    is added takes the next rollouts.
    """
    policy = Policy()
    async with acquire(stack_config(), where=RayCluster(cluster.address)) as stack:
        tasks = run(stack, policy, 8)
        await until_waiting(policy, 8)
        nodes = (await stack.status())["nodes"]
        assert [status["rollouts"] for status in nodes.values()] == [4, 4]
        killed = cluster.list_all_nodes()[1]
        await asyncio.to_thread(cluster.remove_node, killed, allow_graceful=False)
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 4:
            more, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        lost = [task.result() for task in done]
        assert {rollout.error.type for rollout in lost if rollout.error is not None} == {"StackLostError"}
        policy.go.set()
        rollouts = [await task for task in left]
        rollouts += [await task for task in run(stack, policy, len(lost))]
        assert [(rollout.status, rollout.reward, len(rollout.calls)) for rollout in rollouts] == [
            ("completed", 1.0, 2)
        ] * 8
        [status] = (await stack.status())["nodes"].values()
        assert status["rollouts"] == 0
        policy.go.clear()
        policy.waiting = 0
        tasks = run(stack, policy, 4)
        await until_waiting(policy, 4)
        add_node(cluster, 1)  # in the main thread, where Ray sets signals
        async with asyncio.timeout(120):
            while len((await stack.status())["nodes"]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        tasks += run(stack, policy, 4)
        await until_waiting(policy, 8)
        assert [status["rollouts"] for status in (await stack.status())["nodes"].values()] == [4, 4]
        policy.go.set()
        assert [(await task).reward for task in tasks] == [1.0] * 8


@pytest.mark.heavy
async def test_a_drained_node_finishes_and_is_left(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Ray's own drain with a deadline, as a spot machine's notice gives it."""
    ray = pytest.importorskip("ray")
    from ray.core.generated import autoscaler_pb2

    policy = Policy()
    async with acquire(stack_config(), where=RayCluster(cluster.address)) as stack:
        tasks = run(stack, policy, 4)
        await until_waiting(policy, 4)
        node = cluster.list_all_nodes()[1]
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + 600) * 1000)
        client = ray._raylet.GcsClient(address=cluster.address)
        accepted, why = client.drain_node(node.node_id, reason, "a test", deadline_ms)
        assert accepted, why
        async with asyncio.timeout(120):
            while "is being drained; 2 rollouts end there" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        tasks += run(stack, policy, 4)
        await until_waiting(policy, 8)
        nodes = (await stack.status())["nodes"]
        assert sorted(status["rollouts"] for status in nodes.values()) == [2, 6]
        policy.go.set()
        assert {(await task).status for task in tasks} == {"completed"}
        async with asyncio.timeout(120):
            while len((await stack.status())["nodes"]) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.heavy
async def test_keys_reach_neither_rays_files_nor_its_object_store(cluster: Any) -> None:
    """A policy's and a judge's key, which the daemons on the nodes get."""
    ray = pytest.importorskip("ray")
    key = "sk-canary-" + secrets.token_hex(16)
    judge = HTTPEndpoint(base_url="http://127.0.0.1:9/v1", api_key=SecretStr(key))
    config = stack_config(models={"*": judge})
    async with acquire(config, where=RayCluster(cluster.address)) as stack:
        large = {**ROW, "text": "x" * 500_000}
        limits = RolloutLimits(timeout_s=60)
        policy = judge.model_copy(update={"max_retries": 0})
        rollouts = [await stack.run(row, policy=policy, limits=limits) for row in (ROW, large) * 2]
        assert {rollout.error.kind for rollout in rollouts if rollout.error is not None} == {"policy"}
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        places = await asyncio.to_thread(files_of_ray, session)
        assert any(place.match("/proc/*/fd/*") for place in places), "no object store was looked at"
        assert any(place.name.startswith("gcs_server") for place in places), "no log was looked at"
        assert [str(place) for place in places if key.encode() in place.read_bytes()] == []


def files_of_ray(session: Path) -> list[Path]:
    """The files of a session, and the memory of the object stores of this machine."""
    places = [path for path in session.rglob("*") if path.is_file() and not path.is_symlink()]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text().strip() == "raylet":
                places += [fd for fd in (process / "fd").iterdir() if "plasma" in str(fd.readlink())]
    return places


@pytest.mark.heavy
async def test_stacks_take_the_cpus_that_are_free(cluster: Any) -> None:
    """One of the two nodes has none to spare until another job ends; its stack joins then."""
    ray = pytest.importorskip("ray")
    where = RayCluster(cluster.address, cpus_per_stack=1)
    async with acquire(stack_config(), where=where) as first:
        assert len((await first.status())["nodes"]) == 2
        assert ray.cluster_resources()["CPU"] == 2
        async with asyncio.timeout(60):
            while ray.available_resources().get("CPU", 0) > 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with pytest.raises(StackStartError, match="room"):
            async with acquire(stack_config(start_timeout_s=1, linger_s=1), where=where):
                pass
    async with acquire(stack_config(), where=where) as again:
        assert len((await again.status())["nodes"]) == 2
