"""A running stack in the daemon: its gateway, fork servers and environments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from gymgate.core.config import SUPPORTED_NEMO_GYM, Config, EnvironmentConfig, StackConfig
from gymgate.core.errors import ConfigError, StackStartError
from gymgate.core.task_groups import task_group
from gymgate.gateway.server import Gateway
from gymgate.gateway.serving_process import max_rollouts
from gymgate.gym.inside import forkserver
from gymgate.gym.open_needs import sandbox_requirements, telemetry_requirements
from gymgate.gym.runtime import Runtime, ensure_runtime, open_catalog
from gymgate.gym.runtime.command import Progress
from gymgate.stack.container_removal import Containers
from gymgate.stack.daemon.destinations import Destination
from gymgate.stack.daemon.forkserver_pool import ForkServerPool
from gymgate.stack.daemon.hangs import HangWatch, processes_of
from gymgate.stack.daemon.plan import keyless_endpoints
from gymgate.stack.daemon.rollout import UNHEARD_AT_ONCE, new_client
from gymgate.stack.daemon.running_environment import RunningEnvironment, StackContext
from gymgate.stack.description import served_models, stack_settings
from gymgate.stack.paths import remove_ray_directories

STARTING_AT_ONCE = 4
"""Environments that start at once; a fork is cheap, but what a server imports for itself is not."""
_JOINERS_OWN = {"environments", "runtime", "server", "share"}
"""Settings of a process that joins the stack that need not be the stack's, or are compared one by one."""
STOP_TIMEOUT_S = 2.5
"""For an orderly end of the servers; then everything below this process is killed."""


class RunningStack:
    """Started once, stopped once. Belongs to one event loop."""

    def __init__(self, config: StackConfig, directory: Path, progress: Progress) -> None:
        self.config = config
        self.directory = directory
        self.environments: dict[str, RunningEnvironment] = {}
        self.gateway = Gateway(
            judges=keyless_endpoints(dict(config.models)), sandbox_host=config.gateway_host
        )
        self.client = new_client()
        self.max_rollouts = max_rollouts()
        """Those that open files allow at once."""
        self.file_limit = asyncio.Semaphore(self.max_rollouts)
        self.unheard = asyncio.Semaphore(UNHEARD_AT_ONCE)
        self._progress = progress
        self._exits = AsyncExitStack()
        self._fork_servers = ForkServerPool(config, directory, progress)
        self._containers = Containers()
        self._names: dict[str, str] = {}
        """An environment's name or path in the config to its name, which `environments` has."""
        self._settings: dict[str, Any] = {}
        self._unread = 0
        """Environments whose config is not read yet."""

    async def start(self) -> None:
        """Return when every server listens.

        An environment whose servers do not start is left out, with a warning, while another one starts. Raises if
        none does, or for a mistake in the config. Call `stop` in any case.
        """
        # First what needs no port and no process: a mistake in the config leaves nothing to undo.
        resolved = await asyncio.to_thread(self._resolve)
        await self._exits.enter_async_context(self.gateway)
        await self._exits.enter_async_context(self.client)
        context = StackContext(
            self.config,
            self.directory,
            self.gateway,
            self._fork_servers,
            self._containers,
            self._progress,
            self._note_plan,
        )
        self._unread = len(resolved)
        for spec, files, runtime in resolved:
            self.environments[spec.name] = RunningEnvironment(spec, files, runtime, context)
        if (timeout_s := self.config.hang_timeout_s) is not None:
            environments, fork_servers = self.environments, self._fork_servers
            watch = HangWatch(
                lambda: processes_of(environments.values(), fork_servers.running(), timeout_s), timeout_s
            )
            self._exits.callback(asyncio.create_task(watch.run()).cancel)
        limit = asyncio.Semaphore(STARTING_AT_ONCE)
        async with task_group() as group:
            starts = [group.create_task(_start(item, limit)) for item in self.environments.values()]
            self._settings["models"] = await served_models(self.config)
        failures = [failure for start in starts if (failure := start.result()) is not None]
        if len(failures) == len(starts):
            raise failures[0]
        self.max_rollouts = max_rollouts(max(item.files_per_rollout for item in self.environments.values()))
        self.file_limit = asyncio.Semaphore(self.max_rollouts)  # no rollout runs yet
        for failure in failures:
            self._progress(f"warning: {failure}; its rollouts fail, other environments go on")

    def _note_plan(self) -> None:
        """Raise `ConfigError` for an endpoint of a judge that no environment has, once the last config is read.

        With `"*"`, a config may name any.
        """
        self._unread -= 1
        if self._unread:
            return
        judges = {name for environment in self.environments.values() for name in environment.judges}
        names = {name for name, _ in self.config.models}
        if "*" not in names and (unknown := names - judges):
            raise ConfigError(
                f"no judge {min(unknown)!r} in this stack (--judge, in Python models); available: "
                f"{', '.join(sorted(judges)) or 'none'}"
            )

    async def stop(self) -> None:
        """Stop every process. Bounded and idempotent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                stops = (environment.stop() for environment in self.environments.values())
                await asyncio.gather(*stops, return_exceptions=True)
                await self._fork_servers.close()
                await self._exits.aclose()
        # Those that have left their session, and are this process's now: it adopts what loses its parent.
        for pid in {*forkserver.descendants(os.getpid())} - self._containers.pids:
            forkserver.send_signal(pid, signal.SIGKILL)
        self._containers.close()  # after the servers, which would make new ones
        remove_ray_directories()

    def refuse_other(self, joined: StackConfig) -> None:
        """Raise `ConfigError`, which names what differs, unless this stack is what a process that joins it asks for.

        That may be some of the environments. The release must be the same; all other settings may be left at their defaults.
        """
        different: list[str] = []
        for spec in joined.environments:
            if (there := self._spec(spec.name)) is None:
                names = ", ".join(sorted(self.environments))
                raise ConfigError(f"environment {spec.name!r} is not in this stack; available: {names}")
            different += _differences(spec, there, {"name"}, f"{spec.name}.")
        release = self._settings["nemo_gym"]
        if joined.runtime.interpreter is None and joined.runtime.version != release:
            different.append(f"runtime.version: {release!r} there, {joined.runtime.version!r} here")
        different += _differences(joined.runtime, self.config.runtime, {"version"}, "runtime.")
        different += _differences(joined, self.config, _JOINERS_OWN)
        if different:
            raise ConfigError(f"the stack that runs there has other settings: {'; '.join(different)}")

    def _spec(self, name: str) -> EnvironmentConfig | None:
        """Return an environment as the config has it, by its name or path there or by its name in rollouts."""
        specs = (spec for spec in self.config.environments if name in (spec.name, self._names[spec.name]))
        return next(specs, None)

    def describe(self, joined: Sequence[EnvironmentConfig] | None = None) -> dict[str, Any]:
        """Return what a client needs to know once the stack is up: its agents, the gateway's URL, how many rollouts run at once
        at most, the name in rollouts of each environment by its name in the config, and the settings that can change a reward
        (see `stack_settings`), with the models of judges that name none.

        For a client that joined the stack, names and settings are those of the environments that it asked for."""
        names, settings = self._names, self._settings
        if joined is not None:
            specs = {spec.name: self._spec(spec.name) for spec in joined}
            names = {name: self._names[spec.name] for name, spec in specs.items() if spec is not None}
            own_settings = [item for item in settings["environments"] if item["name"] in names.values()]
            settings = {**settings, "environments": own_settings}
        middlewares = {
            environment.name: environment.middlewares()
            for environment in self.environments.values()
            if environment.name in names.values()
        }
        agents = {
            name: {
                "environment": environment.name,
                "instance": name,
                "type": type_,
                "untrainable": environment.plan.untrainable(name),
            }
            for environment in self.environments.values()
            for name, type_ in environment.agents.items()
        }
        return {
            "agents": agents,
            "gateway_url": self.gateway.url,
            "max_rollouts": self.max_rollouts,
            "names": names,
            "settings": {**settings, "middlewares": middlewares},
        }

    def status(self) -> dict[str, Any]:
        """Return the state of everything, for people and tests."""
        return {
            "pid": os.getpid(),
            "directory": str(self.directory),
            "fork_servers": [client.process.pid for client in self._fork_servers.running()],
            "rollouts": len(self.gateway.routes),
            "calls": self.gateway.in_flight,
            "ports": sorted(self.gateway.all_ports),
            "replicas": self.gateway.replicas,
            "environments": {name: environment.describe() for name, environment in self.environments.items()},
        }

    def summary(self) -> dict[str, Any]:
        """Return the state of each environment and the number of rollouts, also while they start."""
        states = {environment.name: environment.state for environment in self.environments.values()}
        return {
            "environments": states or {spec.name: "starting" for spec in self.config.environments},
            "rollouts": len(self.gateway.routes),
        }

    def choose(
        self,
        environment: str | None,
        agent: str | None,
        environment_server: str | None = None,
        taskset: str | None = None,
    ) -> tuple[RunningEnvironment, Destination]:
        """Return the environment of a row and what runs it there.

        The names are those of an environment and of an agent or environment server, `None` for the default; the row's
        `environment_server` precedes where there is one of that name. `taskset` is what the row was materialised for.

        Raises `ConfigError` if there is none of that name, or several, `ServerDiedError` if its config could not be read.
        """
        candidates = [*self.environments.values()]
        if environment is not None:
            name = self._names.get(environment, environment)
            if name not in self.environments:
                names = ", ".join(sorted(self.environments))
                raise ConfigError(f"environment {environment!r} is not in this stack; available: {names}")
            candidates = [self.environments[name]]
        if any(environment_server in candidate.row_targets for candidate in candidates):
            agent = environment_server
        if agent is None:
            routed = [each for each in candidates if taskset in each.tasksets]
            candidates = routed if len(routed) == 1 else candidates
            if len(candidates) > 1:
                names = ", ".join(candidate.name for candidate in candidates)
                raise ConfigError(
                    f"the row has no agent_ref and could go to any of {names}; give the environment"
                )
            return candidates[0], candidates[0].plan.destination(None, taskset)
        having = [candidate for candidate in candidates if agent in candidate.row_targets]
        if len(having) == 1:
            return having[0], having[0].plan.destination(agent, taskset)
        if having:
            names = ", ".join(candidate.name for candidate in having)
            raise ConfigError(f"agent {agent!r} is in {names}; give the environment")
        names = ", ".join(sorted(name for candidate in candidates for name in candidate.agents))
        where = f"environment {environment!r}" if environment else "this stack"
        raise ConfigError(f"agent {agent!r} is not in {where}; available: {names}")

    def _resolve(self) -> list[tuple[EnvironmentConfig, tuple[Path, ...], Runtime]]:
        """Find each environment's config files and make its runtime. Blocks, for minutes on first use."""
        config = self.config
        catalog = open_catalog(config.runtime, config.component_roots, progress=self._progress)
        for spec in config.environments:  # before an installation
            catalog.refuse_unknown(spec.name)
        base = ensure_runtime(config.runtime, progress=self._progress)
        if base.version not in SUPPORTED_NEMO_GYM:
            tested = " and ".join(SUPPORTED_NEMO_GYM)
            self._progress(
                f"warning: gymgate is not tested with nemo-gym {base.version}, only with {tested}; trying it"
            )
        resolved = []
        environments = catalog.environments_of(config.environments)
        self._names = {spec.name: name for spec, name in zip(config.environments, environments, strict=True)}
        self._settings = stack_settings(config, catalog, environments)
        for spec, (name, environment) in zip(config.environments, environments.items(), strict=True):
            environment_config = environment.config(spec.config)
            runtime = base
            of_sandbox = sandbox_requirements(spec, base, config.env_vars)
            of_telemetry = telemetry_requirements(spec, environment_config.all_files, base.version)
            if requirements := (*environment_config.requirements, *of_sandbox, *of_telemetry):
                runtime = ensure_runtime(config.runtime, requirements, progress=self._progress)
            resolved.append((spec.model_copy(update={"name": name}), environment_config.all_files, runtime))
        return resolved


def _differences(here: Config, there: Config, skipped: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield each setting that is not at its default in `here`, and different in `there`."""
    for name in sorted(here.model_dump(exclude_defaults=True).keys() - {*skipped}):
        values = getattr(there, name), getattr(here, name)
        if values[0] == values[1]:
            continue
        is_short = all(value is None or isinstance(value, str | int | float) for value in values)
        both = f": {values[0]!r} there, {values[1]!r} here" if is_short else ""  # endpoints may have secrets
        yield f"{prefix}{name}{both}"


async def _start(environment: RunningEnvironment, limit: asyncio.Semaphore) -> StackStartError | None:
    """Start an environment and return the error that its servers failed with. Raises every other error."""
    async with limit:
        try:
            await environment.start()
        except StackStartError as error:
            return error
    return None
