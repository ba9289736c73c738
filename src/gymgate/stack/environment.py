"""One environment of a stack: its servers, started together, watched, and replaced together when one dies."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gymgate.config import POLICY, EnvironmentConfig
from gymgate.errors import (
    EnvironmentServerError,
    GymgateError,
    ServerDiedError,
    StackLostError,
    StackStartError,
)
from gymgate.files import tail
from gymgate.rollout.outcome import NEVER_ASKED, SCORES_WITHOUT_POLICY, ToServer, asked_policy
from gymgate.stack import gym_config, servers
from gymgate.stack.agent_processes import AgentProcess, AgentProcessPool, Started
from gymgate.stack.forkserver_client import Child, ForkServerClient
from gymgate.stack.gym_config import Instance
from gymgate.stack.plan import (
    Host,
    Plan,
    configured,
    judge_warnings,
    link_programs,
    make_plan,
    model_servers,
    require_judges,
    serve,
)
from gymgate.stack.ports import HeldPort
from gymgate.stack.restarts import Restarts
from gymgate.stack.routing import Strategy

_COMPLAINT = re.compile(r"\b(exit|exited|failed|error|timed out)\b", re.IGNORECASE)

State = Literal["starting", "up", "restarting", "down", "stopped"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Generation:
    """Servers that were started together. `error` is set, and `users` cancelled, when one of them dies."""

    number: int
    spawner: ForkServerClient | None = None
    servers: list[Child] = field(default_factory=list)
    users: set[asyncio.Task[Any]] = field(default_factory=set)
    """Rollouts in flight on these servers."""
    error: ServerDiedError | None = None


class Environment:
    """Started once, then up until stopped, or down for good after too many restarts within a time."""

    def __init__(self, spec: EnvironmentConfig, config_path: Path, host: Host) -> None:
        self.spec = spec
        self.name = spec.name
        self.version = host.version
        self.state: State = "starting"
        self.restarts = Restarts(host.max_restarts, host.restart_window_s)
        self.agent_processes: dict[str, AgentProcessPool] = {}
        """Of the agents whose strategy is `process`."""
        self.judges: frozenset[str] = frozenset()
        """Model servers other than the policy's that its servers may call; empty until the config is read."""
        self._config_path = config_path
        self._host = host
        self._plan: Plan | None = None
        self._ports: dict[str, HeldPort] = {}
        self._generation = Generation(0)
        self._awaited: set[Child] = set()
        """Servers that do not listen yet."""
        self._changed = asyncio.Event()
        self._failure: GymgateError | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._logs = host.directory / "logs" / gym_config.file_name(spec.name)

    async def start(self) -> None:
        """Parse, start every server, return when each listens.

        Raises `ConfigError` and `NeedMissingError` for what the config lacks, `StackStartError` for a server
        that dies or does not listen in time: the environment is down then, and what it had started is gone.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(self._host.start_timeout_s):
                self._host.progress(f"{self.name}: reading its config")
                self._plan = await make_plan(self.spec, self._config_path, self._host, self._logs)
            require_judges(self._plan, self.name, self._host.models)
            self.judges = frozenset(model_servers(self._plan)) - {POLICY}
            for warning in judge_warnings(self._plan):
                self._host.progress(f"{self.name}: warning: {warning}")
            await asyncio.to_thread(link_programs, self._plan, self._host)
            async with asyncio.timeout(self._host.start_timeout_s):
                self._hold_places(self._plan)
                await self._launch()
                await self._start_agent_processes()
        except BaseException as error:
            self._failure = self._too_slow() if isinstance(error, TimeoutError) else _first(error)
            self._set("down")
            await asyncio.shield(self._end_everything())
            if self._failure is None:
                raise
            raise self._failure from None
        self._set("up")
        self._watcher = asyncio.create_task(self._watch())

    @property
    def agents(self) -> dict[str, str]:
        """Agent instance -> implementation; empty until the config is read."""
        return self._plan.agents if self._plan else {}

    @property
    def strategies(self) -> dict[str, Strategy]:
        """Agent instance -> how its rollouts' keys reach their model calls."""
        return self._plan.strategies if self._plan else {}

    @property
    def default_agent(self) -> str | None:
        return self._plan.default_agent if self._plan else None

    def port(self, server: str) -> int:
        return self._ports[server].number

    async def generation(self) -> Generation:
        """The servers to use; waits while they are being replaced.

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
        self, agent: str, result: Mapping[str, Any], calls: Iterable[ToServer]
    ) -> EnvironmentServerError | None:
        """The error of a rollout that has a result although its policy was never asked; with the agent's log.

        `None` for one that failed already or whose policy was asked, and where scores without a policy are allowed.
        """
        assert self._plan is not None
        allowed = self.spec.scores_without_policy or self.agents[agent] in SCORES_WITHOUT_POLICY
        block = next(item for item in self._plan.servers if item.name == agent)
        if result["status"] == "failed" or allowed or asked_policy(calls, gym_config.policy_servers(block)):
            return None
        logs = self._logs.glob(f"{gym_config.file_name(agent)}*.log")
        newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
        lines = tail(newest).splitlines() if newest else []
        said = next((line for line in reversed(lines) if _COMPLAINT.search(line)), "its log shows no error")
        hint = "an environment that may score without the policy needs scores_without_policy=True"
        return EnvironmentServerError(
            f"agent {agent!r} {NEVER_ASKED}: {said.strip()[:400]} ({hint})", server=agent
        )

    async def stop(self) -> None:
        """Stop the servers: asked first, killed after `GRACE_S`. Idempotent."""
        self._set("stopped")
        if self._watcher is not None:
            self._watcher.cancel()
        await self._end_everything(grace_s=servers.GRACE_S)
        for port in self._ports.values():
            port.close()

    def describe(self) -> dict[str, Any]:
        """For `Stack.status`."""
        generation = self._generation
        running = {
            child.name: {"pid": child.pid, "port": self.port(child.name), "alive": child.alive}
            for child in generation.servers
        }
        for agent, pool in self.agent_processes.items():
            running |= pool.describe(agent)
        return {
            "state": self.state,
            "generation": generation.number,
            "restarts": self.restarts.total,
            "recent_restarts": self.restarts.recent,
            "strategies": dict(self.strategies),
            "rollouts": len(generation.users),
            "servers": running,
            "logs": str(self._logs),
        }

    def processes(self) -> Iterator[tuple[Started, int, bool]]:
        """Each process that serves, its port, and whether a rollout may wait for it."""
        generation = self._generation
        if self.state == "up" and generation.spawner is not None:
            for child in generation.servers:
                yield Started(child, generation.spawner), self.port(child.name), bool(generation.users)
        for pool in self.agent_processes.values():
            yield from pool.processes()

    def _hold_places(self, plan: Plan) -> None:
        """Ports for the servers, and agent processes for the agents that need them."""
        for instance in plan.servers:
            if plan.strategies.get(instance.name) == "process":
                start = partial(self._launch_agent, instance)
                host = self._host
                self.agent_processes[instance.name] = AgentProcessPool(
                    self.name, host.agent_processes, host.gateway.agent_ports, start
                )
            else:
                self._ports[instance.name] = HeldPort()

    async def _launch(self) -> None:
        """Start the servers of a new generation and wait until each listens."""
        plan, host = self._plan, self._host
        assert plan is not None
        self._logs.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        self._awaited.clear()
        spawner = await host.spawner()
        config = await configured(plan, host, spawner, self._all_ports(), host.gateway.port_for)
        generation = self._generation = Generation(self._generation.number + 1, spawner)
        try:
            for instance in plan.servers:
                if instance.name not in self.agent_processes:
                    host.progress(f"{self.name}: starting {instance.name}")
                    generation.servers.append(
                        await serve(plan, spawner, self._logs, instance, instance.name, config)
                    )
            async with asyncio.TaskGroup() as group:
                for child in generation.servers:
                    group.create_task(self._listens(child, self.port(child.name)))
        except BaseException as error:
            await asyncio.shield(self._end(generation))
            if (first := _first(error)) is None:
                raise
            raise first from None

    async def _start_agent_processes(self) -> None:
        async with asyncio.TaskGroup() as group:
            for agent, pool in self.agent_processes.items():
                self._host.progress(f"{self.name}: starting {agent}, which serves one rollout per process")
                group.create_task(pool.start())

    async def _launch_agent(self, instance: Instance, process: AgentProcess) -> Started:
        """Start an agent's server, whose model calls go to the process's own gateway ports; return when it listens."""
        plan, host, spawner = self._plan, self._host, await self._host.spawner()
        assert plan is not None
        own = gym_config.policy_urls(instance, plan.urls)

        async def port_for(name: str) -> int:
            return await process.gateway_ports.port_for(name, POLICY if name in own else name)

        child: Child | None = None
        try:
            async with asyncio.timeout(host.start_timeout_s):
                ports = self._all_ports() | {instance.name: process.port}
                config = await configured(plan, host, spawner, ports, port_for)
                name = f"{instance.name} process {process.number}"
                child = await serve(plan, spawner, self._logs, instance, name, config)
                await self._listens(child, process.port)
                return Started(child, spawner)
        except BaseException as error:
            await asyncio.shield(servers.end(spawner, [child] if child else []))
            if isinstance(error, TimeoutError):
                raise servers.too_slow(self.name, host.start_timeout_s, child) from None
            raise

    def _all_ports(self) -> dict[str, int]:
        """By server; of an agent with a process per rollout, those who call it find its first process."""
        ports = {agent: pool.all[0].port for agent, pool in self.agent_processes.items()}
        return ports | {name: port.number for name, port in self._ports.items()}

    async def _listens(self, child: Child, port: int) -> None:
        self._awaited.add(child)
        await servers.until_listening(child, port, self.name)
        self._awaited.discard(child)

    async def _watch(self) -> None:
        """Replace the servers whenever one of them dies, as often as that is allowed."""
        while self.state == "up" and self._generation.servers:
            generation = self._generation
            await asyncio.wait(
                [child.exited for child in generation.servers], return_when=asyncio.FIRST_COMPLETED
            )
            dead = next(child for child in generation.servers if not child.alive)
            self._fail_users(generation, dead)
            await self._end(generation)
            await self._restart()

    def _fail_users(self, generation: Generation, dead: Child) -> None:
        self._set("restarting")
        generation.error = self._failure = servers.died(dead, self.name)
        for task in generation.users:
            task.cancel()

    async def _restart(self) -> None:
        """Start the servers anew until they listen; the environment is down if that takes too many restarts."""
        restarts = self.restarts
        while (wait_s := restarts.next_wait()) is not None:
            when = f"in {wait_s:g} s" if wait_s else "now"
            count = f"{restarts.recent} of {restarts.limit} within {restarts.window_s:g} s"
            self._host.progress(
                f"warning: {self.name}: {self._failure}; restarting its servers {when} ({count})"
            )
            await asyncio.sleep(wait_s)
            try:
                async with asyncio.timeout(self._host.start_timeout_s):
                    await self._launch()
            except TimeoutError:
                self._failure = self._too_slow()
            except GymgateError as error:
                self._failure = error
            except Exception as error:  # whatever it is, nobody must wait for servers that nobody starts
                logger.exception("%s", self.name)
                self._failure = StackStartError(f"{type(error).__name__}: {error}", environment=self.name)
            else:
                self._set("up")
                return
        self._set("down")
        self._host.progress(f"warning: {self._down()}")

    async def _end(self, generation: Generation, grace_s: float = 0.0) -> None:
        await servers.end(generation.spawner, generation.servers, grace_s)

    async def _end_everything(self, grace_s: float = 0.0) -> None:
        await asyncio.gather(
            self._end(self._generation, grace_s),
            *(pool.stop(grace_s) for pool in self.agent_processes.values()),
        )

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
        return servers.too_slow(self.name, self._host.start_timeout_s, next(iter(self._awaited), None))


def _first(error: BaseException) -> GymgateError | None:
    """The error of ours in a group of errors, or the error if it is ours."""
    if isinstance(error, GymgateError):
        return error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((found for each in inner if (found := _first(each)) is not None), None)
