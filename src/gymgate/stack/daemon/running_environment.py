"""One environment of a stack: its servers start together, are watched, and are replaced together when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shutil
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gymgate.core import codec
from gymgate.core.config import POLICY, EnvironmentConfig, StackConfig
from gymgate.core.errors import (
    GymgateError,
    PolicyNeverAskedError,
    ServerDiedError,
    StackLostError,
    StackStartError,
)
from gymgate.core.files import tail
from gymgate.core.task_groups import task_group
from gymgate.gateway.server import Gateway
from gymgate.gateway.serving_process import FEW_FILES_PER_ROLLOUT, FILES_PER_ROLLOUT
from gymgate.gym.catalog.sandboxes import LOCAL, choose_provider, sandbox_block
from gymgate.gym.gym_config import checked_config, parse_order
from gymgate.gym.inside.resolve import Node, ServerInstance, provider_in
from gymgate.gym.open_needs import TELEMETRY, WITHOUT_TELEMETRY
from gymgate.gym.overrides import refuse_unknown
from gymgate.gym.runtime import Runtime, npm
from gymgate.gym.runtime.cache import gym_cache
from gymgate.gym.runtime.command import Progress
from gymgate.gym.runtime.containers import ROLLOUT
from gymgate.gym.server_code import component_roots
from gymgate.rollouts import ModelCall
from gymgate.rollouts.outcome import SCORES_WITHOUT_POLICY
from gymgate.rollouts.record import has_policy_call
from gymgate.stack.container_removal import Containers
from gymgate.stack.daemon import children
from gymgate.stack.daemon.agent_processes import AgentProcess, AgentProcessPool
from gymgate.stack.daemon.children import Child
from gymgate.stack.daemon.forkserver_client import ForkServerClient
from gymgate.stack.daemon.forkserver_pool import ForkServerPool
from gymgate.stack.daemon.plan import EnvironmentPlan, require_sandboxes
from gymgate.stack.ports import HeldPort
from gymgate.stack.restarts import Restarts
from gymgate.stack.workers import worker_name

_COMPLAINT = re.compile(r"^(?!Found ulimit of ).*\b(exit|exited|failed|error|timed out)\b", re.IGNORECASE)
"""A line in an agent's log that may say why it ended. NeMo Gym's on `ulimit` is about no rollout."""

LEAN = "lean"
"""What a server is noted as whose middlewares are all gymgate's."""
State = Literal["starting", "up", "restarting", "down", "stopped"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StackContext:
    """What the environments of a stack share."""

    config: StackConfig
    directory: Path
    """For logs."""
    gateway: Gateway
    fork_servers: ForkServerPool
    containers: Containers
    progress: Progress
    on_plan: Callable[[], None] = lambda: None
    """Called by each environment once its config is read, before it starts a server."""
    run_id: str = field(default_factory=lambda: secrets.token_hex(6))
    """Names the stack's servers in NeMo Gym's telemetry, unless its config does."""


@dataclass(eq=False)
class ServerSet:
    """Servers that were started together. `error` is set, and `rollouts` cancelled, when one of them dies."""

    generation: int = 0
    """Counts the sets of an environment, from 1."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the Docker containers that these servers start."""
    ports: dict[Child, int] = field(default_factory=dict)
    """Each server's."""
    rollouts: set[asyncio.Task[Any]] = field(default_factory=set)
    """Rollouts in flight on these servers."""
    error: ServerDiedError | None = None


class RunningEnvironment:
    """Started once, then up until it is stopped, or permanently down after too many restarts within a time."""

    def __init__(
        self, spec: EnvironmentConfig, config_files: Sequence[Path], runtime: Runtime, stack: StackContext
    ) -> None:
        """`runtime` is the environment's own: its requirements may differ from its siblings'."""
        self.spec = spec
        self.name = spec.name
        self.state: State = "starting"
        self.restarts = Restarts(stack.config.max_restarts, stack.config.restart_window_s)
        self.agent_processes: dict[str, AgentProcessPool] = {}
        """Agents whose strategy is `process`, by instance name."""
        self._config_files = config_files
        self._runtime = runtime
        self._stack = stack
        self._plan: EnvironmentPlan | None = None
        """`None` until the config is read."""
        self._ports: dict[str, list[HeldPort]] = {}
        """Ports of each server's workers."""
        self._rollouts: Counter[int] = Counter()
        """In flight at each port of an agent or environment server."""
        self._servers = ServerSet()
        self._changed = asyncio.Event()
        self._failure: GymgateError | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._logs = stack.directory / "logs" / _log_name(spec.name, stack.config.environments)

    async def start(self) -> None:
        """Read the config and start every server. Returns when each listens.

        Raises `ConfigError` and `NeedMissingError` for what the config lacks, `StackStartError` for a server
        that dies or does not listen in time. Then the environment is down, and everything that it started is gone.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            async with self._in_time():
                plan = self._plan = await self._read_plan()
            plan.require_judges()  # the config alone shows what is missing, in seconds: nothing is started for it
            self._stack.on_plan()
            for warning in plan.warnings():
                self._stack.progress(f"warning: {self.name}: {warning}")
            await asyncio.to_thread(self._link_commands)  # before agents start, whose PATH begins with them
            self._hold_ports()  # of all servers before one starts: each is told the ports of the others
            await self._launch()
            async with (
                task_group() as group
            ):  # last: an agent process may call resources servers as it starts
                for agent, pool in self.agent_processes.items():
                    self._stack.progress(
                        f"{self.name}: starting {agent}, which serves one rollout per process"
                    )
                    group.create_task(pool.start())
        except BaseException as error:
            self._failure = error if isinstance(error, GymgateError) else None
            self._set("down")
            await asyncio.shield(self._end_everything())
            raise
        self._set("up")  # before the watcher, which watches only what is up
        self._watcher = asyncio.create_task(self._watch())

    @property
    def plan(self) -> EnvironmentPlan:
        """What it starts. Raises `ServerDiedError` if its config could not be read."""
        if self._plan is None:
            raise self._down()
        return self._plan

    @property
    def agents(self) -> dict[str, str]:
        """Agent instance -> implementation; empty until the config is read."""
        return self._plan.agents if self._plan else {}

    @property
    def row_targets(self) -> Mapping[str, str]:
        """The names that rows may have, with their implementations; empty until the config is read."""
        return self._plan.row_targets if self._plan else {}

    @property
    def tasksets(self) -> Collection[str]:
        """The materialised tasksets that its config routes to an environment server; empty until it is read."""
        return self._plan.tasksets if self._plan else ()

    @property
    def judges(self) -> frozenset[str]:
        """Model servers other than the policy's that its servers may call; empty until the config is read."""
        return self._plan.judges if self._plan else frozenset()

    @contextlib.contextmanager
    def server_port(self, server: str) -> Iterator[int]:
        """Give a rollout the port of the worker with the fewest rollouts, of its agent or environment server."""
        port = min((held.number for held in self._ports[server]), key=self._rollouts.__getitem__)
        self._rollouts[port] += 1
        try:
            yield port
        finally:
            self._rollouts[port] -= 1

    def remove_containers(self, servers: ServerSet, key: str) -> None:
        """Remove the containers that servers may leave of a rollout whose agent never answered. Does not wait.

        Containers that were made outside of a rollout's request do not tell whose they are, and stay until the servers end.
        """
        if servers.labels:
            self._stack.containers.remove_of_rollout(key)

    async def server_set(self) -> ServerSet:
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
        return self._servers

    def never_asked_error(
        self, agent: str, result: Mapping[str, Any], calls: Iterable[ModelCall]
    ) -> PolicyNeverAskedError | None:
        """Return the error of a rollout that has a result although its policy was never asked, with the agent's log.

        `None` for one that failed already or whose policy was asked, and where scores without a policy are allowed.
        """
        allowed = self.spec.scores_without_policy or self.agents.get(agent) in SCORES_WITHOUT_POLICY
        if result["status"] == "failed" or allowed or has_policy_call(calls):
            return None
        logs = self._logs.glob(f"{_file_name(agent)}*.log")
        newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
        lines = tail(newest).splitlines() if newest else []
        reason = next((line for line in reversed(lines) if _COMPLAINT.search(line)), "its log shows no error")
        hint = "an environment that may score without the policy needs scores_without_policy=True"
        message = f"agent {agent!r} exited before its first model call: {reason.strip()[:400]} ({hint})"
        return PolicyNeverAskedError(message, server=agent)

    async def stop(self) -> None:
        """Stop the servers with SIGINT, and kill them after `GRACE_S`. Idempotent."""
        self._set("stopped")
        if self._watcher is not None:
            self._watcher.cancel()
        await self._end_everything(grace_s=children.GRACE_S)
        # Only now: a port that is released while its server listens could be given to another process.
        for ports in self._ports.values():
            for port in ports:
                port.close()

    def describe(self) -> dict[str, Any]:
        """Return the state, for `Stack.status`."""
        servers = {
            child.name: {"pid": child.pid, "port": port, "alive": child.alive}
            for child, port in self._servers.ports.items()
        }
        for pool in self.agent_processes.values():
            servers |= pool.describe()
        return {
            "state": self.state,
            "generation": self._servers.generation,
            "restarts": self.restarts.total,
            "recent_restarts": self.restarts.recent,
            "strategies": dict(self._plan.strategies) if self._plan else {},
            "rollouts": len(self._servers.rollouts),
            "servers": servers,
            "logs": str(self._logs),
        }

    @property
    def files_per_rollout(self) -> int:
        """The most open files of a rollout in one process, as its servers are now."""
        is_lean = {*self.middlewares().values()} == {LEAN}
        holds_few = is_lean and self._plan is not None and self._plan.holds_few_files
        return FEW_FILES_PER_ROLLOUT if holds_few else FILES_PER_ROLLOUT

    def middlewares(self) -> dict[str, str]:
        """Return by server whether it is lean, or what stays NeMo Gym's own and why."""
        return {child.name: self._middlewares_of(child) for child, _, _ in self.processes_to_watch()}

    def _middlewares_of(self, child: Child) -> str:
        try:
            kept = codec.loads(self._noted(child.name).read_bytes())
            reasons = "; ".join(f"{what} as in NeMo Gym: {reason}" for what, reason in kept.items())
        except (OSError, ValueError, AttributeError):  # it was not told to, or has no middlewares
            return "as in NeMo Gym"
        return f"{LEAN}, but {reasons}" if kept else LEAN

    def processes_to_watch(self) -> Iterator[tuple[Child, int, bool]]:
        """Yield each live server, its port, and whether a rollout may wait for it."""
        if self.state == "up":
            for child, port in self._servers.ports.items():
                yield child, port, bool(self._servers.rollouts)
        for pool in self.agent_processes.values():
            yield from pool.servers()

    @contextlib.asynccontextmanager
    async def _in_time(self, servers: Collection[Child] = ()) -> AsyncIterator[None]:
        """Raise `StackStartError` after `start_timeout_s`, for one of the servers that does not listen yet."""
        timeout_s = self._stack.config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            late = next((child for child in servers if not child.listens), None)
            raise children.start_timeout_error(self.name, timeout_s, late) from None

    async def _fork_server(self) -> ForkServerClient:
        """Return the fork server of the environment's runtime; a new one if the last has died."""
        return await self._stack.fork_servers.client(self._runtime.python)

    async def _read_plan(self) -> EnvironmentPlan:
        """Have NeMo Gym's parser resolve the config, and read the servers' code.

        Raises `ConfigError` and `NeedMissingError` for what the config lacks.
        """
        stack, site = self._stack, self._runtime.site
        stack.progress(f"{self.name}: reading its config")
        sandbox: Node | None = None
        if self.spec.sandbox is not None:
            sandbox = sandbox_block(self.spec.sandbox, site)
            # NeMo Gym's settings name a directory below the server's working directory.
            if self.spec.sandbox == LOCAL:
                sandbox[LOCAL]["workspace_root"] = str(stack.directory / "sandboxes")
        order = parse_order(
            self._config_files,
            self.spec.overrides,
            stack.directory / "results",
            gym_cache(),
            provider_in(sandbox),
        )
        fork_server = await self._fork_server()
        log, directory = self._logs / "config.log", str(_working_directory(stack.directory))
        answer = await fork_server.parse(self.name, log, directory=directory, **order)
        config = checked_config(answer, self.name)
        if isinstance(telemetry := config.get(TELEMETRY), dict):
            config[TELEMETRY] = telemetry | {"run_id": telemetry.get("run_id") or stack.run_id}
            if telemetry.get("enabled") and self._runtime.version in WITHOUT_TELEMETRY:
                release = self._runtime.version
                stack.progress(
                    f"warning: {self.name}: telemetry has no effect: nemo-gym {release} exports nothing"
                )
        if sandbox is not None:
            choose_provider(config, sandbox)

        def read() -> EnvironmentPlan:
            roots = component_roots(self._config_files, stack.config.component_roots, site)
            refuse_unknown(self.name, answer["added"], config, roots)
            plan = EnvironmentPlan.read(self.spec, stack.config, self._runtime.version, config, roots)
            require_sandboxes(plan, site)
            return plan

        return await asyncio.to_thread(read)

    def _link_commands(self) -> None:
        """Link each agent's command, in the version of its settings. Blocks, for about 15 s where npm installs one."""
        for agent, type_ in self.plan.agents.items():
            directory = self._commands(agent)
            shutil.rmtree(directory, ignore_errors=True)  # an earlier stack's
            block = self.plan.servers[agent].block
            command = npm.ensure_agent_command(type_, block, self._stack.progress)
            if command is not None:
                directory.mkdir(parents=True)
                for program in command.parent.iterdir():  # the command, and its Node.js if it has one
                    (directory / program.name).symlink_to(program)

    def _commands(self, server: str) -> Path:
        """Return the directory that precedes an agent's PATH: two agents may run one command in different versions."""
        return self._logs / "commands" / _file_name(server)

    def _hold_ports(self) -> None:
        """Reserve ports for the servers' workers, and agent processes for the agents that need them."""
        for name, server in self.plan.servers.items():
            if self.plan.strategies.get(name) == "process":
                size, start = self._stack.config.agent_processes, partial(self._start_agent, server)
                ports = self._stack.gateway.agent_ports
                self.agent_processes[name] = AgentProcessPool(self.name, size, ports, start)
            else:
                self._ports[name] = [HeldPort() for _ in range(self.plan.workers.counts[name])]

    async def _launch(self) -> None:
        """Start a new set of servers and wait until each listens. Raises `StackStartError`, with none of them left."""
        self._logs.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary files may have removed it
        labels = await self._new_labels()
        servers = self._servers = ServerSet(self._servers.generation + 1, labels)
        workers = range(max(self.plan.workers.counts.values()))
        try:
            async with self._in_time(servers.ports), task_group() as group:
                fork_server = await self._fork_server()
                ports = [self._ports_for(worker) for worker in workers]
                port_for = self._stack.gateway.port_for
                configs = [await self._config(fork_server, own, port_for, labels) for own in ports]
                for server, held in self._ports.items():
                    for worker, port in enumerate(held):
                        name = worker_name(server, worker, len(held))
                        self._stack.progress(f"{self.name}: starting {name}")
                        child = await self._start_server(fork_server, server, name, configs[worker], labels)
                        servers.ports[child] = port.number
                        group.create_task(children.until_listening(child, port.number, self.name))
        except BaseException:
            await asyncio.shield(children.end(servers.ports))
            self._stack.containers.remove_of_servers(labels)
            raise

    async def _start_agent(self, instance: ServerInstance, process: AgentProcess) -> None:
        """Start the server of an agent process, whose model calls go to its own gateway ports; return when it listens."""
        own_urls = self.plan.policy_urls(instance)

        async def port_for(name: str) -> int:
            return await process.gateway_ports.port_for(name, POLICY if name in own_urls else name)

        started: list[Child] = []
        async with self._in_time(started):
            fork_server, labels = await self._fork_server(), await self._new_labels()
            ports = self._ports_for(process.number - 1) | {instance.name: process.port}
            config = await self._config(fork_server, ports, port_for, labels)
            name = f"{instance.name} process {process.number}"
            child = await self._start_server(fork_server, instance.name, name, config, labels)
            process.adopt(child, self.name)
            started.append(child)
            child.exited.add_done_callback(lambda _: self._stack.containers.remove_of_servers(labels))
            await children.until_listening(child, process.port, self.name)

    async def _new_labels(self) -> dict[str, str]:
        """Return labels for the Docker containers of servers that are about to start; empty if they start none."""
        return await asyncio.to_thread(self._stack.containers.new_labels) if self.plan.uses_docker else {}

    def _ports_for(self, worker: int) -> dict[str, int]:
        """Return the port at which a server's worker of this number, from 0, finds each server and itself.

        It is always the same worker's port, which knows the sessions of its rollouts. Servers that call an agent with a
        process per rollout find its first process.
        """
        ports = {agent: pool.all[0].port for agent, pool in self.agent_processes.items()}
        return ports | {name: held[worker % len(held)].number for name, held in self._ports.items()}

    async def _config(
        self,
        fork_server: ForkServerClient,
        ports: Mapping[str, int],
        port_for: Callable[[str], Awaitable[int]],
        labels: Mapping[str, str],
    ) -> Node:
        """Return the config for servers at these ports. Their model servers are at the gateway's ports that `port_for` gives."""
        gateway = {name: await port_for(name) for name in self.plan.model_servers}
        ray = await fork_server.ray_address(self._stack.progress) if self.plan.uses_ray else None
        return self.plan.server_config(ports, gateway, ray=ray, labels=labels)

    async def _start_server(
        self, fork_server: ForkServerClient, server: str, name: str, config: Node, labels: Mapping[str, str]
    ) -> Child:
        """Start a process of a server under a name, which its log has too. It does not listen yet."""
        code = self.plan.code[server]
        return await fork_server.serve(
            name,
            self._logs / f"{_file_name(name)}.log",
            directory=str(code.directory),
            entrypoint=self.plan.servers[server].entrypoint,
            instance=server,
            config=config,
            ray=code.uses_ray,
            commands=str(self._commands(server)),
            labels=dict(labels),
            rollout_label=ROLLOUT,
            lean=None if self._stack.config.stock_servers else str(self._noted(name)),
        )

    def _noted(self, server: str) -> Path:
        """Return the file in which a lean server notes what stays NeMo Gym's own."""
        return self._logs / f"{_file_name(server)}.lean.json"

    async def _watch(self) -> None:
        """Replace the servers whenever one of them dies, as often as that is allowed."""
        while self.state == "up" and self._servers.ports:
            servers = self._servers
            exits = [child.exited for child in servers.ports]
            await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
            dead = next(child for child in servers.ports if not child.alive)
            self._set("restarting")
            servers.error = self._failure = dead.exit_error(self.name)
            for task in servers.rollouts:  # after the error is set: a cancelled rollout reads it
                task.cancel()
            await children.end(servers.ports)
            self._stack.containers.remove_of_servers(servers.labels)
            await self._restart()

    async def _restart(self) -> None:
        """Start the servers again until they listen. The environment is down if that takes too many restarts."""
        restarts = self.restarts
        while (wait_s := restarts.next_wait()) is not None:
            when = f"in {wait_s:g} s" if wait_s else "now"
            count = f"{restarts.recent} of {restarts.limit} within {restarts.window_s:g} s"
            self._stack.progress(
                f"warning: {self.name}: {self._failure}; restarting its servers {when} ({count})"
            )
            await asyncio.sleep(wait_s)
            try:
                await self._launch()
            except GymgateError as error:
                self._failure = error
            except Exception as error:
                # Of whatever kind: rollouts must not wait for servers that nobody starts.
                logger.exception("%s", self.name)
                self._failure = StackStartError(f"{type(error).__name__}: {error}", environment=self.name)
            else:
                self._set("up")
                return
        self._set("down")
        self._stack.progress(f"warning: {self._down()}")

    async def _end_everything(self, grace_s: float = 0.0) -> None:
        pools = (pool.stop(grace_s) for pool in self.agent_processes.values())
        await asyncio.gather(children.end(self._servers.ports, grace_s), *pools)

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


def _working_directory(fallback: Path) -> Path:
    """Return the daemon's working directory, which was the SDK process's; it may have been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return fallback


def _log_name(name: str, environments: Sequence[EnvironmentConfig]) -> str:
    """Return the name of an environment's log directory; further ones of the same file name get a number."""
    alike = [spec.name for spec in environments if _file_name(spec.name) == _file_name(name)]
    number = alike.index(name) if name in alike else 0
    return f"{_file_name(name)}-{number + 1}" if number else _file_name(name)


def _file_name(name: str) -> str:
    """Return a name in a form that can be part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "_"
