"""One environment of a stack: its servers start together, are watched, and are replaced together when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gymgate.catalog import ServerInstance
from gymgate.catalog.needs import policy_servers
from gymgate.config import POLICY, EnvironmentConfig
from gymgate.errors import (
    EnvironmentServerError,
    GymgateError,
    ServerDiedError,
    StackLostError,
    StackStartError,
)
from gymgate.files import tail
from gymgate.rollout import ModelCall
from gymgate.rollout.outcome import NEVER_ASKED, SCORES_WITHOUT_POLICY, asked_policy
from gymgate.stack import children, gym_config
from gymgate.stack.agent_processes import AgentProcess, AgentProcessPool
from gymgate.stack.children import Child
from gymgate.stack.plan import (
    EnvironmentContext,
    EnvironmentPlan,
    container_labels,
    judge_warnings,
    link_programs,
    make_plan,
    model_servers,
    policy_host,
    require_judges,
    server_config,
    start_server,
)
from gymgate.stack.ports import HeldPort
from gymgate.stack.restarts import Restarts
from gymgate.stack.routing import Strategy, refuse_unroutable
from gymgate.stack.workers import worker_name

_COMPLAINT = re.compile(r"\b(exit|exited|failed|error|timed out)\b", re.IGNORECASE)

State = Literal["starting", "up", "restarting", "down", "stopped"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Generation:
    """Servers that were started together. `error` is set, and `users` cancelled, when one of them dies."""

    number: int
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the Docker containers that these servers start."""
    servers: dict[Child, int] = field(default_factory=dict)
    """Each with its port."""
    users: dict[asyncio.Task[Any], float] = field(default_factory=dict)
    """Rollouts in flight on these servers, and when each began (Unix time)."""
    error: ServerDiedError | None = None
    abandoned: list[tuple[float, float]] = field(default_factory=list)
    """When rollouts began and ended that were cancelled and whose containers may still be there. Unix time."""


class RunningEnvironment:
    """Started once, then up until it is stopped, or down for good after too many restarts within a time."""

    def __init__(
        self, spec: EnvironmentConfig, config_files: Sequence[Path], context: EnvironmentContext
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.state: State = "starting"
        self.restarts = Restarts(context.config.max_restarts, context.config.restart_window_s)
        self.agent_processes: dict[str, AgentProcessPool] = {}
        """Agents whose strategy is `process`, by instance name."""
        self.judges: frozenset[str] = frozenset()
        """Model servers other than the policy's that its servers may call; empty until the config is read."""
        self._config_files = config_files
        self._context = context
        self._plan: EnvironmentPlan | None = None
        self._ports: dict[str, list[HeldPort]] = {}
        """Ports of each server's workers."""
        self._rollouts: Counter[int] = Counter()
        """In flight at each port of an agent."""
        self._generation = Generation(0)
        self._awaited: set[Child] = set()
        """Servers that do not listen yet."""
        self._changed = asyncio.Event()
        self._failure: GymgateError | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._logs = context.directory / "logs" / gym_config.file_name(spec.name)

    async def start(self) -> None:
        """Read the config and start every server. Returns when each listens.

        Raises `ConfigError` and `NeedMissingError` for what the config lacks, `StackStartError` for a server
        that dies or does not listen in time. Then the environment is down, and everything that it started is gone.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                self._context.progress(f"{self.name}: reading its config")
                self._plan = await make_plan(self.spec, self._config_files, self._context, self._logs)
            require_judges(self._plan, self.name, dict(self._context.config.models))
            self.judges = frozenset(model_servers(self._plan)) - {POLICY}
            for warning in (*judge_warnings(self._plan), *self._plan.workers.warnings):
                self._context.progress(f"warning: {self.name}: {warning}")
            await asyncio.to_thread(link_programs, self._plan, self._context, self._logs)
            async with asyncio.timeout(self._timeout_s):
                self._hold_ports(self._plan)
                await self._launch(self._plan)
                await self._start_agent_processes()
        except BaseException as error:
            self._failure = self._too_slow() if isinstance(error, TimeoutError) else _first(error)
            self._set("down")
            await asyncio.shield(self._end_everything())
            if self._failure is None:
                raise
            raise self._failure from None
        self._set("up")
        self._watcher = asyncio.create_task(self._watch(self._plan))

    @property
    def agents(self) -> dict[str, str]:
        """Agent instance -> implementation; empty until the config is read."""
        return self._plan.agents if self._plan else {}

    @property
    def default_agent(self) -> str | None:
        return self._plan.default_agent if self._plan else None

    def strategy(self, agent: str) -> Strategy:
        """Return how the keys of an agent's rollouts reach its model calls. Raises `ConfigError` if they cannot."""
        assert self._plan is not None
        if (strategy := self._plan.strategies[agent]) == "none":
            raise refuse_unroutable(agent, self.agents[agent], self._context.runtime.version)
        return strategy

    def policy_servers(self, agent: str) -> frozenset[str]:
        """Return the model servers that are an agent's policy."""
        assert self._plan is not None
        return policy_servers(next(item for item in self._plan.servers if item.name == agent))

    @contextlib.contextmanager
    def agent_port(self, agent: str) -> Iterator[int]:
        """Give a rollout the port of the agent's worker with the fewest rollouts."""
        port = min((each.number for each in self._ports[agent]), key=self._rollouts.__getitem__)
        self._rollouts[port] += 1
        try:
            yield port
        finally:
            self._rollouts[port] -= 1

    def remove_containers(self, generation: Generation, key: str, began: float, *, cancelled: bool) -> None:
        """Have the containers removed that servers may leave of a rollout that ended without an agent's answer.

        Some containers do not tell whose they are (those made outside of a request). Those made while a cancelled rollout
        ran go once every rollout has ended that was there when they were made. `began` is when this one did (Unix time).
        """
        if generation.labels:
            self._context.containers.remove_of_rollout(key)
            if cancelled:
                generation.abandoned.append((began, time.time()))

    def remove_unclaimed(self, generation: Generation) -> None:
        """Have the containers of cancelled rollouts removed that do not tell whose they are. Call it after each rollout."""
        running = generation.users.values()
        for window in [*generation.abandoned]:
            until = min([window[1], *running])
            if until > window[0]:
                self._context.containers.remove_unclaimed(generation.labels, window[0], until)
            if until == window[1]:
                generation.abandoned.remove(window)

    async def generation(self) -> Generation:
        """Return the servers to use; waits while they are being replaced.

        Raises `ServerDiedError` if the environment is down.
        """
        while self.state != "up":
            if self.state == "down":
                raise self._down()
            if self.state == "stopped":
                raise StackLostError("the stack is stopping")
            self._changed.clear()
            await self._changed.wait()
        return self._generation

    def unasked(
        self, agent: str, result: Mapping[str, Any], calls: Iterable[ModelCall]
    ) -> EnvironmentServerError | None:
        """Return the error of a rollout that has a result although its policy was never asked, with the agent's log.

        `None` for one that failed already or whose policy was asked, and where scores without a policy are allowed.
        """
        assert self._plan is not None
        allowed = self.spec.scores_without_policy or self.agents[agent] in SCORES_WITHOUT_POLICY
        if result["status"] == "failed" or allowed or asked_policy(calls):
            return None
        logs = self._logs.glob(f"{gym_config.file_name(agent)}*.log")
        newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
        lines = tail(newest).splitlines() if newest else []
        reason = next((line for line in reversed(lines) if _COMPLAINT.search(line)), "its log shows no error")
        hint = "an environment that may score without the policy needs scores_without_policy=True"
        message = f"agent {agent!r} {NEVER_ASKED}: {reason.strip()[:400]} ({hint})"
        return EnvironmentServerError(message, server=agent)

    async def stop(self) -> None:
        """Stop the servers with SIGINT, and kill them after `GRACE_S`. Idempotent."""
        self._set("stopped")
        if self._watcher is not None:
            self._watcher.cancel()
        await self._end_everything(grace_s=children.GRACE_S)
        for ports in self._ports.values():
            for port in ports:
                port.close()

    def describe(self) -> dict[str, Any]:
        """Return the state, for `Stack.status`."""
        generation = self._generation
        servers = {
            child.name: {"pid": child.pid, "port": port, "alive": child.alive}
            for child, port in generation.servers.items()
        }
        for pool in self.agent_processes.values():
            servers |= pool.describe()
        return {
            "state": self.state,
            "generation": generation.number,
            "restarts": self.restarts.total,
            "recent_restarts": self.restarts.recent,
            "strategies": dict(self._plan.strategies) if self._plan else {},
            "rollouts": len(generation.users),
            "servers": servers,
            "logs": str(self._logs),
        }

    def servers(self) -> Iterator[tuple[Child, int, bool]]:
        """Yield each live server, its port, and whether a rollout may wait for it."""
        generation = self._generation
        if self.state == "up":
            for child, port in generation.servers.items():
                yield child, port, bool(generation.users)
        for pool in self.agent_processes.values():
            yield from pool.servers()

    @property
    def _timeout_s(self) -> float:
        return self._context.config.start_timeout_s

    def _hold_ports(self, plan: EnvironmentPlan) -> None:
        """Reserve ports for the servers' workers, and agent processes for the agents that need them."""
        context = self._context
        for instance in plan.servers:
            if plan.strategies.get(instance.name) == "process":
                size, start = context.config.agent_processes, partial(self._start_agent, plan, instance)
                pool = AgentProcessPool(self.name, size, context.gateway.agent_ports, start)
                self.agent_processes[instance.name] = pool
            else:
                self._ports[instance.name] = [HeldPort() for _ in range(plan.workers.counts[instance.name])]

    async def _launch(self, plan: EnvironmentPlan) -> None:
        """Start the servers of a new generation and wait until each listens."""
        context = self._context
        self._logs.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary files may have removed it
        self._awaited.clear()
        fork_server = await context.fork_server()
        labels = await container_labels(plan, context)
        host = policy_host(plan, context)
        configs = [
            await server_config(
                plan, context, fork_server, self._ports_for(worker), context.gateway.port_for, labels, host
            )
            for worker in range(max(plan.workers.counts.values()))
        ]
        generation = self._generation = Generation(self._generation.number + 1, labels)
        try:
            for instance in plan.servers:
                ports = self._ports.get(instance.name, [])
                for worker, port in enumerate(ports):
                    name = worker_name(instance.name, worker, len(ports))
                    context.progress(f"{self.name}: starting {name}")
                    child = await start_server(
                        plan, fork_server, self._logs, instance, name, configs[worker], labels
                    )
                    generation.servers[child] = port.number
            async with asyncio.TaskGroup() as group:
                for child, number in generation.servers.items():
                    group.create_task(self._listens(child, number))
        except BaseException as error:
            await asyncio.shield(children.end(generation.servers))
            context.containers.remove(labels)
            if (first := _first(error)) is None:
                raise
            raise first from None

    async def _start_agent_processes(self) -> None:
        async with asyncio.TaskGroup() as group:
            for agent, pool in self.agent_processes.items():
                self._context.progress(f"{self.name}: starting {agent}, which serves one rollout per process")
                group.create_task(pool.start())

    async def _start_agent(
        self, plan: EnvironmentPlan, instance: ServerInstance, process: AgentProcess
    ) -> Child:
        """Start the server of an agent process, whose model calls go to its own gateway ports; return when it listens."""
        context, fork_server = self._context, await self._context.fork_server()
        own = gym_config.policy_urls(instance, plan.urls)

        async def port_for(name: str) -> int:
            return await process.gateway_ports.port_for(name, POLICY if name in own else name)

        child: Child | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                ports = self._ports_for(process.number - 1) | {instance.name: process.port}
                labels = await container_labels(plan, context)
                config = await server_config(plan, context, fork_server, ports, port_for, labels)
                name = f"{instance.name} process {process.number}"
                child = await start_server(plan, fork_server, self._logs, instance, name, config, labels)
                child.exited.add_done_callback(lambda _: context.containers.remove(labels))
                await self._listens(child, process.port)
                return child
        except BaseException as error:
            await asyncio.shield(children.end([child] if child else []))
            if isinstance(error, TimeoutError):
                raise children.too_slow(self.name, self._timeout_s, child) from None
            raise

    def _ports_for(self, worker: int) -> dict[str, int]:
        """Return the port at which a server's worker of this number, from 0, finds each server and itself.

        It is always the same worker's port, which knows the sessions of its rollouts. Servers that call an agent with a
        process per rollout find its first process.
        """
        ports = {agent: pool.all[0].port for agent, pool in self.agent_processes.items()}
        return ports | {name: held[worker % len(held)].number for name, held in self._ports.items()}

    async def _listens(self, child: Child, port: int) -> None:
        self._awaited.add(child)
        await children.until_listening(child, port, self.name)
        self._awaited.discard(child)

    async def _watch(self, plan: EnvironmentPlan) -> None:
        """Replace the servers whenever one of them dies, as often as that is allowed."""
        while self.state == "up" and self._generation.servers:
            generation = self._generation
            exits = [child.exited for child in generation.servers]
            await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
            dead = next(child for child in generation.servers if not child.alive)
            self._fail_users(generation, dead)
            await children.end(generation.servers)
            self._context.containers.remove(generation.labels)
            await self._restart(plan)

    def _fail_users(self, generation: Generation, dead: Child) -> None:
        self._set("restarting")
        generation.error = self._failure = dead.died(self.name)
        for task in generation.users:
            task.cancel()

    async def _restart(self, plan: EnvironmentPlan) -> None:
        """Start the servers again until they listen. The environment is down if that takes too many restarts."""
        restarts = self.restarts
        while (wait_s := restarts.next_wait()) is not None:
            when = f"in {wait_s:g} s" if wait_s else "now"
            count = f"{restarts.recent} of {restarts.limit} within {restarts.window_s:g} s"
            self._context.progress(
                f"warning: {self.name}: {self._failure}; restarting its servers {when} ({count})"
            )
            await asyncio.sleep(wait_s)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._launch(plan)
            except TimeoutError:
                self._failure = self._too_slow()
            except GymgateError as error:
                self._failure = error
            except (
                Exception
            ) as error:  # of whatever kind: rollouts must not wait for servers that nobody starts
                logger.exception("%s", self.name)
                self._failure = StackStartError(f"{type(error).__name__}: {error}", environment=self.name)
            else:
                self._set("up")
                return
        self._set("down")
        self._context.progress(f"warning: {self._down()}")

    async def _end_everything(self, grace_s: float = 0.0) -> None:
        pools = (pool.stop(grace_s) for pool in self.agent_processes.values())
        await asyncio.gather(children.end(self._generation.servers, grace_s), *pools)

    def _set(self, state: State) -> None:
        if self.state != "stopped":
            self.state = state
        self._changed.set()

    def _down(self) -> ServerDiedError:
        failure = self._failure
        what = "did not start"
        if self._watcher is not None:
            what = f"is down after {self.restarts.limit} restarts within {self.restarts.window_s:g} s"
        return ServerDiedError(
            f"environment {self.name!r} {what}: {failure}",
            environment=self.name,
            server=getattr(failure, "server", None),
            log_tail=getattr(failure, "log_tail", None),
        )

    def _too_slow(self) -> StackStartError:
        return children.too_slow(self.name, self._timeout_s, next(iter(self._awaited), None))


def _first(error: BaseException) -> GymgateError | None:
    """Return the first of gymgate's errors in a group, or the error itself if it is one."""
    if isinstance(error, GymgateError):
        return error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((found for each in inner if (found := _first(each)) is not None), None)
