"""One environment of a stack: its servers, started together, watched, and replaced together when one dies."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gymgate.config import EnvironmentConfig
from gymgate.errors import ConfigError, GymgateError, ServerDiedError, StackLostError, StackStartError
from gymgate.gateway import Gateway
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.stack import gym_config
from gymgate.stack.gym_config import AGENTS, Instance
from gymgate.stack.ports import HeldPort, listening_inodes, owns_socket
from gymgate.stack.spawner import Child, Spawner

POLL_S, MAX_POLL_S = 0.02, 0.2
GRACE_S = 0.8
"""For a server to shut down after SIGINT, before it is killed."""

State = Literal["starting", "up", "restarting", "down", "stopped"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Generation:
    """Servers that were started together. `error` is set, and `users` cancelled, when one of them dies."""

    number: int
    spawner: Spawner | None = None
    servers: list[Child] = field(default_factory=list)
    users: set[asyncio.Task[Any]] = field(default_factory=set)
    """Rollouts in flight on these servers."""
    error: ServerDiedError | None = None


@dataclass(frozen=True)
class Plan:
    """What an environment consists of."""

    config: dict[str, Any]
    servers: list[Instance]
    directories: dict[str, Path]
    ray: frozenset[str]
    """Instances that need Ray."""
    urls: tuple[str, ...]
    """Keys of models that servers call by themselves; the gateway stands in for each by that name."""


@dataclass(frozen=True)
class Host:
    """What an environment gets from its stack."""

    spawner: Callable[[], Awaitable[Spawner]]
    """The fork server, a new one if the last has died."""
    ray_address: Callable[[Spawner], Awaitable[str]]
    gateway: Gateway
    version: str
    site: Path
    component_roots: tuple[str, ...]
    directory: Path
    """For logs."""
    cache_dir: Path
    start_timeout_s: float
    max_restarts: int
    progress: Callable[[str], None]
    endpoints: frozenset[str] = frozenset()
    """Model servers that have an endpoint; `"*"`: all."""


class Environment:
    """Started once, then up until stopped, or down for good after too many restarts."""

    def __init__(self, spec: EnvironmentConfig, config_path: Path, host: Host) -> None:
        self.spec = spec
        self.name = spec.name
        self.version = host.version
        self.state: State = "starting"
        self.restarts = 0
        self.agents: dict[str, str] = {}
        """Agent instance -> implementation."""
        self.default_agent: str | None = None
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
        that dies or does not listen in time.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(self._host.start_timeout_s):
                self._host.progress(f"{self.name}: reading its config")
                self._plan = await self._make_plan()
                self._warn_of_urls(self._plan)
                for instance in self._plan.servers:
                    self._ports[instance.name] = HeldPort()
                await self._launch()
        except TimeoutError:
            raise self._too_slow() from None
        self._set("up")
        self._watcher = asyncio.create_task(self._watch())

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

    async def stop(self) -> None:
        """Stop the servers: asked first, killed after `GRACE_S`. Idempotent."""
        self._set("stopped")
        if self._watcher is not None:
            self._watcher.cancel()
        await self._end(self._generation, grace_s=GRACE_S)
        for port in self._ports.values():
            port.close()

    def describe(self) -> dict[str, Any]:
        """For `Stack.status`."""
        generation = self._generation
        servers = {
            child.name: {"pid": child.pid, "port": self.port(child.name), "alive": child.alive}
            for child in generation.servers
        }
        return {
            "state": self.state,
            "generation": generation.number,
            "restarts": self.restarts,
            "rollouts": len(generation.users),
            "servers": servers,
            "logs": str(self._logs),
        }

    async def _make_plan(self) -> Plan:
        host = self._host
        spawner = await host.spawner()
        answer = await spawner.parse(
            self.name,
            self._logs / "config.log",
            directory=str(working_directory(host.directory)),
            config_paths=[str(self._config_path)],
            initial=gym_config.initial_config(host.version, host.directory / "results", host.cache_dir),
            overrides=[list(pair) for pair in self.spec.overrides],
        )
        config = gym_config.checked_config(answer, self.name)
        servers = gym_config.servers_to_start(config, self.spec.agent)
        self.agents = {item.name: item.type for item in servers if item.kind == AGENTS}
        if not self.agents:
            raise ConfigError(f"environment {self.name!r} has no agent in {self._config_path}")
        self.default_agent = gym_config.default_agent(config, self.spec.agent)
        roots = gym_config.component_roots(self._config_path, host.component_roots, host.site)
        directories = {item.name: gym_config.directory_of(item, roots) for item in servers}
        ray = {item.name for item in servers if gym_config.uses_ray(directories[item.name], item.entrypoint)}
        return Plan(config, servers, directories, frozenset(ray), tuple(answer.get("urls", ())))

    def _warn_of_urls(self, plan: Plan) -> None:
        """Some servers swallow the failure of a model that they call by themselves, and score 0."""
        for key in plan.urls:
            if not self._host.endpoints & {key, "*"}:
                self._host.progress(
                    f"{self.name}: warning: a server calls a model by its {key}, which no endpoint stands for; "
                    f'if its scores need it, map it with models={{"{key}": ...}}'
                )

    async def _launch(self) -> None:
        """Start the servers of a new generation and wait until each listens."""
        plan, host = self._plan, self._host
        assert plan is not None
        self._awaited.clear()
        spawner = await host.spawner()
        names = [*gym_config.model_servers(plan.config), *plan.urls]
        if gym_config.is_own_judge(plan.config):
            names.append(POLICY_AS_JUDGE)
        models = {name: await host.gateway.port_for(name) for name in names}
        ray = await host.ray_address(spawner) if plan.ray else None
        ports = {name: port.number for name, port in self._ports.items()}
        config = gym_config.placed(plan.config, ports, models, ray)
        generation = self._generation = Generation(self._generation.number + 1, spawner)
        try:
            for instance in plan.servers:
                host.progress(f"{self.name}: starting {instance.name}")
                child = await spawner.serve(
                    instance.name,
                    self._logs / f"{gym_config.file_name(instance.name)}.log",
                    directory=str(plan.directories[instance.name]),
                    entrypoint=instance.entrypoint,
                    instance=instance.name,
                    config=config,
                    ray=instance.name in plan.ray,
                )
                generation.servers.append(child)
            async with asyncio.TaskGroup() as group:
                for child in generation.servers:
                    group.create_task(self._listens(child))
        except BaseExceptionGroup as errors:
            await asyncio.shield(self._end(generation))
            raise _first(errors) from None
        except BaseException:
            await asyncio.shield(self._end(generation))
            raise

    async def _listens(self, child: Child) -> None:
        """Return when the child listens on its port; `StackStartError` if it exits first."""
        self._awaited.add(child)
        port, pause = self.port(child.name), POLL_S
        while child.alive:
            inode = listening_inodes([port]).get(port)
            if inode is not None and owns_socket(child.pid, inode):
                self._awaited.discard(child)
                return
            await asyncio.wait([child.exited], timeout=pause)
            pause = min(pause * 1.3, MAX_POLL_S)
        raise self._died_starting(child)

    async def _watch(self) -> None:
        """Replace the servers whenever one of them dies, as often as that is allowed."""
        while self.state == "up":
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
        generation.error = self._failure = self._died(dead)
        logger.warning("%s", generation.error)
        for task in generation.users:
            task.cancel()

    async def _restart(self) -> None:
        while self.restarts < self._host.max_restarts:
            self.restarts += 1
            try:
                async with asyncio.timeout(self._host.start_timeout_s):
                    await self._launch()
            except TimeoutError:
                self._failure = self._too_slow()
            except GymgateError as error:
                self._failure = error
            else:
                self._set("up")
                return
            logger.warning("%s: restart %d failed: %s", self.name, self.restarts, self._failure)
        self._set("down")

    async def _end(self, generation: Generation, grace_s: float = 0.0) -> None:
        running, spawner = [child for child in generation.servers if child.alive], generation.spawner
        if spawner is None or not running:
            return
        if grace_s:
            for child in running:
                spawner.kill(child, signal.SIGINT)
            await asyncio.wait([child.exited for child in running], timeout=grace_s)
        for child in running:
            spawner.kill(child)
        await asyncio.wait([child.exited for child in running], timeout=GRACE_S)

    def _set(self, state: State) -> None:
        if self.state != "stopped":
            self.state = state
        self._changed.set()

    def _died(self, child: Child) -> ServerDiedError:
        return ServerDiedError(
            f"server {child.name!r} of {self.name!r} died ({how(child)})",
            environment=self.name,
            server=child.name,
            log_tail=child.log_tail(),
        )

    def _down(self) -> ServerDiedError:
        failure = self._failure
        return ServerDiedError(
            f"environment {self.name!r} is down after {self.restarts} restarts: {failure}",
            environment=self.name,
            server=getattr(failure, "server", None),
            log_tail=getattr(failure, "log_tail", None),
        )

    def _died_starting(self, child: Child) -> StackStartError:
        text = child.log_tail()
        last = f": {text.splitlines()[-1]}" if text else ""
        return StackStartError(
            f"server {child.name!r} of {self.name!r} died while starting ({how(child)}){last}",
            environment=self.name,
            server=child.name,
            log_tail=text,
        )

    def _too_slow(self) -> StackStartError:
        slow = next(iter(self._awaited), None)
        return StackStartError(
            f"environment {self.name!r} was not up after {self._host.start_timeout_s:g} s"
            + (f"; still waiting for server {slow.name!r}" if slow else ""),
            environment=self.name,
            server=slow.name if slow else None,
            log_tail=slow.log_tail() if slow else None,
        )


def working_directory(fallback: Path) -> Path:
    """The daemon's, which was that of the SDK process; it may have been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return fallback


def how(child: Child) -> str:
    """How a child ended, in words."""
    status = child.exited.result() if child.exited.done() else None
    if status is None:
        return "the fork server died"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One error out of a group, ours before others."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in flat if isinstance(error, GymgateError)), flat[0])
