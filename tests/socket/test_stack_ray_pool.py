"""The pool of stacks on a Ray cluster, with Ray's actors in this process: real links, scripted daemons at their ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import pytest
from pydantic import SecretStr

from gymgate.core import codec
from gymgate.core.config import HTTPEndpoint, RayCluster, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, PolicyError, StackLostError, StackStartError
from gymgate.stack import Stack, acquire
from gymgate.stack.protocol import Peer, Reply
from gymgate.stack.ray import nodes as ray_nodes
from gymgate.stack.ray import pool as ray_pool

KEY = "sk-canary"
CONFIG = StackConfig(
    environments=("mcqa",),
    models={"judge": HTTPEndpoint(base_url="http://127.0.0.1:9/v1", api_key=SecretStr(KEY))},
)
ROW = {"responses_create_params": {"input": "hello"}}


class RayError(Exception):
    """Of Ray's calls."""


class Daemon:
    """The stack on one node. It starts once `starts` is set, as it is at first; `run` waits until `go` is set."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.starts = asyncio.Event()
        self.starts.set()
        self.go = asyncio.Event()
        self.runs: list[dict[str, Any]] = []
        self.refuses: dict[str, Any] | None = None
        self.endpoints: dict[int, dict[str, Any]] = {}
        """Those that were registered and not forgotten since, by number."""
        self.peer = Peer(
            {"hello": self.hello, "run": self.run, "status": self.status, "bye": self.bye},
            {
                "register": lambda message: self.endpoints.update({message["number"]: message["endpoint"]}),
                "forget": lambda message: self.endpoints.update({message["number"]: {}}),
            },
        )

    async def hello(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        assert message["config"]["models"]["judge"]["api_key"] == KEY
        assert "ray" not in message["config"]
        await self.starts.wait()
        if self.refuses is not None:
            raise StackStartError(**self.refuses)
        agent = {"environment": "mcqa", "instance": "mcqa_agent", "type": "simple_agent"}
        return {
            "agents": {"mcqa_agent": agent},
            "gateway_url": "http://127.0.0.1:1/v1",
            "pid": 1,
            "max_rollouts": 100,
        }

    async def run(self, message: dict[str, Any], row: bytes) -> Reply:
        self.runs.append(message)
        await self.go.wait()
        answer = b""
        policy = message["policy"]
        policy = self.endpoints[policy] if isinstance(policy, int) else policy
        if policy["type"] == "callable":
            name = {"name": policy["name"]}
            answer = (await self.peer.exchange("policy", name, codec.dumps({"asked": self.node}))).body
        fields = {
            "id": message["rollout_id"],
            "environment": "mcqa",
            "agent": "mcqa_agent",
            "status": "completed",
        }
        answered = codec.loads(answer)["choices"][0]["message"]["content"] if answer else None
        result = {"reward": 1.0, "row": codec.loads(row), "answered": answered}
        fields |= {"reward": 1.0, "timing": {}, "calls": [], "requests": [], "result": result}
        return Reply(None, codec.dumps(fields))

    async def status(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        replica = {"healthy": self.node == "a", "output_tokens": 5}
        return {"rollouts": len(self.runs), "calls": {"http://p": 2}, "replicas": {"http://p": replica}}

    async def bye(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        asyncio.get_running_loop().call_soon(self.peer.abort)
        return {"last": True}


class Node(ray_nodes.Relay):
    """The actor on a node; `remote` calls are made in this process, and fail once the node is dead."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__()
        self.daemon = daemon
        self.dead = asyncio.Event()
        self.sent: list[Any] = []

    async def open(self, link: str, config: Mapping[str, Any], identity: str) -> dict[str, Any] | None:
        self.sent.append((config, identity))
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().create_unix_connection(lambda: self.daemon.peer, sock=theirs)
        self._links[link] = await asyncio.open_unix_connection(sock=ours)
        self._expect(link)
        return None

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return Call(self, value) if name in ("open", "read", "write", "close") else value


class Call:
    """A method with `remote`, as Ray's handles have it."""

    def __init__(self, node: Node, method: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.node = node
        self.method = method

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.call(*args))

    async def call(self, *args: Any) -> Any:
        assert all(len(arg) <= ray_nodes.CHUNK for arg in args if isinstance(arg, bytes))
        work = asyncio.ensure_future(self.method(*args))
        dying = asyncio.ensure_future(self.node.dead.wait())
        try:
            await asyncio.wait([work, dying], return_when=asyncio.FIRST_COMPLETED)
            if self.node.dead.is_set():
                raise RayError("the actor died")
            answer = work.result()
            assert not isinstance(answer, bytes) or len(answer) <= ray_nodes.CHUNK
            return answer
        finally:
            work.cancel()
            dying.cancel()


class Cluster:
    """Nodes by name, and what Ray says of them."""

    class exceptions:
        RayError = RayError

    def __init__(self) -> None:
        self.cpus = {"a": 4.0, "b": 4.0}
        self.draining: set[str] = set()
        self.dying: set[str] = set()
        self.daemons: dict[str, list[Daemon]] = {"a": [], "b": [], "c": []}
        self.actors: dict[str, Node] = {}
        self.killed: list[Node] = []
        self.refuses: dict[str, Any] | None = None
        self.prepare: Callable[[Daemon], None] = lambda daemon: None

    def start(self, ray: Any, node_id: str, cpus: float, name: str | None) -> Node:
        daemon = Daemon(node_id)
        daemon.refuses = self.refuses
        self.prepare(daemon)
        self.daemons[node_id].append(daemon)
        self.actors[node_id] = Node(daemon)
        if node_id in self.dying:
            self.actors[node_id].dead.set()
        return self.actors[node_id]

    def nodes_of(self, ray: Any) -> tuple[list[dict[str, Any]], set[str]]:
        nodes = [
            {"NodeID": name, "Resources": {"CPU": cpus}, "NodeManagerHostname": "host"}
            for name, cpus in self.cpus.items()
        ]
        return nodes, self.draining

    def kill(self, actor: Node) -> None:
        self.killed.append(actor)

    def lose(self, name: str) -> None:
        del self.cpus[name]
        self.actors[name].dead.set()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(ray_pool, "attach", lambda address: made)
    monkeypatch.setattr(ray_pool, "detach", lambda: None)
    monkeypatch.setattr(ray_pool, "nodes_of", made.nodes_of)
    monkeypatch.setattr(ray_pool, "start_relay", made.start)
    monkeypatch.setattr(ray_pool, "LOOK_S", 0.02)
    return made


@contextlib.asynccontextmanager
async def running(stack: Stack, count: int, **options: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """So many rollouts under way."""
    tasks = [asyncio.create_task(stack.run(ROW, policy=answer, **options)) for _ in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": request["asked"]}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def counts(cluster: Cluster) -> dict[str, int]:
    return {name: len(daemons[-1].runs) for name, daemons in cluster.daemons.items() if daemons}


async def test_rollouts_spread_and_callables_answer_in_this_process(cluster: Cluster) -> None:
    async with acquire(CONFIG, where=RayCluster("x")) as stack, running(stack, 10) as tasks:
        await until(lambda: counts(cluster) == {"a": 5, "b": 5})
        assert stack.agents["mcqa_agent"].environment == "mcqa"
        assert stack.description["max_rollouts"] == 200, "as many as both allow"
        status = await stack.status()
        assert status["calls"] == {"http://p": 4}
        assert status["replicas"] == {"http://p": {"healthy": False, "output_tokens": 10}}
        assert len(status["nodes"]) == 2
        cluster.daemons["a"][0].go.set()
        cluster.daemons["b"][0].go.set()
        rollouts = [await task for task in tasks]
    assert {rollout.reward for rollout in rollouts} == {1.0}
    asked = sorted(rollout.result["answered"] for rollout in rollouts)
    assert asked == ["a"] * 5 + ["b"] * 5
    assert len(cluster.killed) == 2


async def test_keys_cross_only_in_the_links(cluster: Cluster) -> None:
    async with acquire(CONFIG, where=RayCluster("x")):
        sent = [each for actor in cluster.actors.values() for each in actor.sent]
    assert len(sent) == 2
    assert KEY not in repr(sent)


async def test_a_registered_callable_serves_every_node(cluster: Cluster) -> None:
    cluster.prepare = lambda daemon: daemon.go.set()
    async with acquire(CONFIG, where=RayCluster("x")) as stack:
        endpoint = stack.register("mine", answer)
        for _ in range(4):
            assert (await stack.run(ROW, policy=endpoint)).status == "completed"
        stack.unregister("mine")
        with pytest.raises(ConfigError, match="'mine'"):
            await stack.run(ROW, policy=endpoint)


async def test_an_endpoint_is_sent_once_to_every_node(cluster: Cluster) -> None:
    """Under that connection's own number."""
    endpoints = [HTTPEndpoint(base_url=f"http://{name}") for name in ("p", "q")]
    async with acquire(CONFIG, where=RayCluster("x")) as stack:
        running = [
            asyncio.create_task(stack.run(ROW, policy=policy, judge_policy=endpoints[1]))
            for policy in [*endpoints, *reversed(endpoints)] * 2
        ]
        await until(lambda: counts(cluster) == {"a": 4, "b": 4})
        for name in ("a", "b"):
            [daemon] = cluster.daemons[name]
            urls = {number: endpoint["base_url"] for number, endpoint in daemon.endpoints.items()}
            assert sorted(urls.values()) == ["http://p", "http://q"]
            assert {urls[run["judge_policy"]] for run in daemon.runs} == {"http://q"}
            assert {urls[run["policy"]] for run in daemon.runs} == {"http://p", "http://q"}
            daemon.go.set()
        assert {(await task).reward for task in running} == {1.0}


async def test_large_bodies_cross_in_chunks(cluster: Cluster) -> None:
    cluster.prepare = lambda daemon: daemon.go.set()
    async with acquire(CONFIG, where=RayCluster("x")) as stack:
        row = {**ROW, "text": "x" * 1_000_000}
        rollout = await stack.run(row, policy=HTTPEndpoint(base_url="http://p"))
        assert rollout.result["row"] == row


async def test_further_rollouts_wait_for_room(cluster: Cluster) -> None:
    where = RayCluster("x", rollouts_per_stack=2)
    async with acquire(CONFIG, where=where) as stack, running(stack, 6) as tasks:
        await until(lambda: counts(cluster) == {"a": 2, "b": 2})
        short = await stack.run(ROW, policy=answer, limits=RolloutLimits(timeout_s=0.1))
        assert short.error is not None
        assert "runs 2 rollouts" in short.error.message
        assert short.error.kind == "timeout"
        cluster.daemons["a"][0].go.set()
        await asyncio.wait(tasks[:1])
        await until(lambda: counts(cluster)["a"] == 4)
        assert counts(cluster)["b"] == 2
        waited = cluster.daemons["a"][0].runs[-1]["limits"]["timeout_s"]
        assert waited < RolloutLimits().timeout_s
        cluster.daemons["b"][0].go.set()
        assert {(await task).status for task in tasks} == {"completed"}


async def test_a_lost_node_fails_its_rollouts_and_others_go_on(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with acquire(CONFIG, where=RayCluster("x")) as stack, running(stack, 4) as tasks:
        await until(lambda: counts(cluster) == {"a": 2, "b": 2})
        cluster.lose("b")
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        cluster.daemons["a"][0].go.set()
        rollouts = [await task for task in tasks]
        lost = [rollout for rollout in rollouts if rollout.error is not None]
        assert len(lost) == 2
        for rollout in lost:
            assert rollout.error.type == "StackLostError"
            assert rollout.error.kind == "infrastructure"
            assert rollout.error.retryable
            assert "host/b is lost (RayError)" in rollout.error.message
        again = await asyncio.gather(*(stack.run(ROW, policy=answer) for _ in lost))
        assert {rollout.reward for rollout in again} == {1.0}
        assert counts(cluster) == {"a": 4, "b": 2}
    assert any(" 1 are left" in record.message for record in caplog.records)


async def test_without_any_node_the_stack_is_lost(cluster: Cluster) -> None:
    async with acquire(CONFIG, where=RayCluster("x")) as stack, running(stack, 2) as tasks:
        await until(lambda: counts(cluster) == {"a": 1, "b": 1})
        cluster.lose("a")
        cluster.lose("b")
        await asyncio.wait(tasks)
        with pytest.raises(StackLostError, match="every stack"):
            await stack.run(ROW, policy=answer)


async def test_the_pool_ends_when_its_last_stack_does_not_start_again(cluster: Cluster) -> None:
    async with acquire(CONFIG, where=RayCluster("x")) as stack:
        cluster.prepare = lambda daemon: daemon.starts.clear()
        cluster.refuses = {"message": "no space left on a", "environment": "mcqa"}
        cluster.actors["a"].dead.set()
        await until(lambda: len(cluster.daemons["a"]) == 2)
        cluster.lose("b")
        await until(lambda: cluster.actors["b"] in cluster.killed)
        async with running(stack, 2, limits=RolloutLimits(timeout_s=5)) as tasks:
            cluster.daemons["a"][1].starts.set()
            for task in tasks:
                with pytest.raises(StackLostError, match="no space left on a"):
                    await task


async def test_a_drained_node_finishes_although_no_other_stack_starts(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with acquire(CONFIG, where=RayCluster("x")) as stack, running(stack, 2) as tasks:
        await until(lambda: counts(cluster) == {"a": 1, "b": 1})
        cluster.draining.add("a")
        await until(lambda: "host/a is being drained" in caplog.text)
        cluster.refuses = {"message": "b is full", "environment": "mcqa"}
        cluster.actors["b"].dead.set()
        await until(lambda: len(cluster.daemons["b"]) == 2 and cluster.actors["b"] in cluster.killed)
        cluster.daemons["a"][0].go.set()
        assert {(await task).status for task in tasks} == {"completed", "failed"}
        with pytest.raises(StackLostError, match="every stack"):
            await stack.run(ROW, policy=answer, limits=RolloutLimits(timeout_s=5))


async def test_a_drained_node_finishes_its_rollouts_and_gets_no_more(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with acquire(CONFIG, where=RayCluster("x")) as stack, running(stack, 2) as tasks:
        await until(lambda: counts(cluster) == {"a": 1, "b": 1})
        cluster.draining.add("b")
        await until(lambda: "host/b is being drained; 1 rollouts end there" in caplog.text)
        async with running(stack, 3):
            await until(lambda: counts(cluster) == {"a": 4, "b": 1})
            assert cluster.actors["b"] not in cluster.killed
            cluster.daemons["b"][0].go.set()
            await until(lambda: cluster.actors["b"] in cluster.killed)
            cluster.daemons["a"][0].go.set()
            assert {(await task).status for task in tasks} == {"completed"}


async def test_a_node_that_joins_or_comes_back_gets_a_stack(cluster: Cluster) -> None:
    async with acquire(CONFIG, where=RayCluster("x")) as stack:
        cluster.cpus["c"] = 4.0
        await until(lambda: bool(cluster.daemons["c"]))
        cluster.actors["a"].dead.set()  # the actor alone: its node is still there
        await until(lambda: len(cluster.daemons["a"]) == 2)
        async with asyncio.timeout(20):
            while len((await stack.status())["nodes"]) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_a_node_gets_as_many_stacks_as_fit(cluster: Cluster) -> None:
    async with acquire(CONFIG, where=RayCluster("x", cpus_per_stack=2)) as stack:
        assert len((await stack.status())["nodes"]) == 4
    with pytest.raises(ConfigError, match="5 CPUs"):
        async with acquire(CONFIG, where=RayCluster("x", cpus_per_stack=5)):
            pass


async def test_a_stack_that_does_not_start_is_the_error(cluster: Cluster) -> None:
    cluster.refuses = {"message": "mcqa did not start", "environment": "mcqa"}
    with pytest.raises(StackStartError, match="mcqa did not start"):
        async with acquire(CONFIG, where=RayCluster("x")):
            pass
    assert len(cluster.killed) == 2


async def test_a_node_where_ray_starts_no_actor_is_the_error(cluster: Cluster) -> None:
    """A node without gymgate, for example. One that joins later is left out."""
    cluster.dying = {"c"}
    async with acquire(CONFIG, where=RayCluster("x")) as stack:
        cluster.cpus["c"] = 4.0
        await until(lambda: cluster.actors.get("c") in cluster.killed)
        assert len((await stack.status())["nodes"]) == 2
    with pytest.raises(StackStartError, match="the actor died"):
        async with acquire(CONFIG, where=RayCluster("x")):
            pass


async def test_a_cancelled_rollout_is_cancelled_on_its_node(cluster: Cluster) -> None:
    async with acquire(CONFIG, where=RayCluster("x")) as stack:
        task = asyncio.create_task(stack.run(ROW, policy=answer))
        await until(lambda: counts(cluster)["a"] == 1)
        task.cancel()
        await until(lambda: not cluster.daemons["a"][0].peer.tasks)


async def test_a_failing_callable_is_the_policys_error(cluster: Cluster) -> None:
    def fails(request: dict[str, Any]) -> dict[str, Any]:
        raise PolicyError("the engine is gone")

    cluster.prepare = lambda daemon: daemon.go.set()
    async with acquire(CONFIG, where=RayCluster("x")) as stack:
        with pytest.raises(PolicyError, match="the engine is gone"):
            await stack.run(ROW, policy=fails)


async def test_a_caller_that_is_silent_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed says nothing more; the daemon must not wait for it."""
    monkeypatch.setattr(ray_nodes, "SILENT_S", 0.05)
    relay = ray_nodes.Relay()
    ours, theirs = socket.socketpair()
    relay._links["link"] = await asyncio.open_unix_connection(sock=ours)
    relay._expect("link")
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    assert await relay.read("link") == b""
    assert await relay.close("link")
    writer.close()
