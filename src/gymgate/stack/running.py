"""A stack that runs: its gateway, fork servers and environments, and the rollouts on them. Lives in the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from gymgate.catalog import Catalog
from gymgate.config import (
    SUPPORTED_NEMO_GYM,
    EnvironmentConfig,
    StackConfig,
)
from gymgate.errors import GymgateError, StackLostError, StackStartError, described
from gymgate.gateway import Gateway, Route
from gymgate.gateway.limits import raise_file_limit
from gymgate.rollout import result as results
from gymgate.rollout import run as rollouts
from gymgate.runtime import Runtime, ensure_runtime
from gymgate.runtime.cache import gym_cache
from gymgate.stack import forkserver, routing
from gymgate.stack.agent_processes import AgentProcess
from gymgate.stack.environment import Environment, Generation
from gymgate.stack.forkserver_pool import ForkServerPool
from gymgate.stack.handover import pack_calls
from gymgate.stack.hangs import HangWatch, processes_of
from gymgate.stack.plan import Host, with_address
from gymgate.stack.protocol import Reply
from gymgate.stack.request import Request, choose

STARTING_AT_ONCE = 4
"""Environments; a fork is cheap, what a server imports for itself is not."""
FILES_KEPT = 64
FILES_PER_ROLLOUT = 6
"""Sockets that one rollout can hold in the daemon or in its agent's server, which has the same limit."""
STOP_TIMEOUT_S = 2.5

Result = TypeVar("Result")
Progress = Callable[[str], None]

logger = logging.getLogger(__name__)


class RunningStack:
    """Started once, stopped once. Belongs to one event loop."""

    def __init__(self, config: StackConfig, directory: Path, progress: Progress) -> None:
        self.config = config
        self.directory = directory
        self.environments: dict[str, Environment] = {}
        self.gateway = Gateway(judges=with_address(dict(config.models)))
        self._places = asyncio.Semaphore(places_for_files())
        self._progress = progress
        self._exits = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self._fork_servers = ForkServerPool(config, directory, progress)
        self._named: dict[str, str] = {}
        """An environment's name in the catalog, `letter_share`, to the one it was asked for by, a path for instance."""

    async def start(self) -> None:
        """Return when every server listens.

        An environment whose servers do not start is left out, with a warning, while another one starts. Raises if
        none does, or for what the caller has to mend; `stop` has to be called all the same.
        """
        resolved = await asyncio.to_thread(self._resolve)
        await self._exits.enter_async_context(self.gateway)
        self._session = await self._exits.enter_async_context(rollouts.new_session())
        for spec, config_path, runtime in resolved:
            self.environments[spec.name] = Environment(spec, config_path, self._host(runtime))
        self._watch_for_hangs()
        limit = asyncio.Semaphore(STARTING_AT_ONCE)
        starts = [self._start(environment, limit) for environment in self.environments.values()]
        failures = [failure for failure in await _all_or_first_error(starts) if failure is not None]
        if len(failures) == len(starts):
            raise failures[0]
        for failure in failures:
            self._progress(f"warning: {failure}; its rollouts fail, other environments go on")

    async def stop(self) -> None:
        """Stop every process; bounded, idempotent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                stops = (environment.stop() for environment in self.environments.values())
                await asyncio.gather(*stops, return_exceptions=True)
                await self._fork_servers.close()
                await self._exits.aclose()
        for pid in forkserver.descendants(os.getpid()):
            forkserver.send_signal(pid, signal.SIGKILL)
        self._fork_servers.remove_files()

    def describe(self) -> dict[str, Any]:
        """What a client needs to know once the stack is up."""
        agents = {
            name: {"environment": environment.name, "instance": name, "type": type_}
            for environment in self.environments.values()
            for name, type_ in environment.agents.items()
        }
        return {"agents": agents, "gateway_url": self.gateway.url}

    def status(self) -> dict[str, Any]:
        """For people and tests."""
        return {
            "pid": os.getpid(),
            "directory": str(self.directory),
            "fork_servers": [spawner.process.pid for spawner in self._fork_servers.running()],
            "rollouts": len(self.gateway.routes),
            "calls": self.gateway.in_flight,
            "replicas": self.gateway.replicas,
            "environments": {name: item.describe() for name, item in self.environments.items()},
        }

    async def run(self, request: Request) -> Reply:
        """The rollout, packed. Its deadline counts from here on, whatever it waits for.

        Raises only what is the caller's fault (`ConfigError`, `DataError`).
        """
        started = time.monotonic()
        named = request.environment
        if named is not None and named not in self.environments:
            named = self._named.get(named, named)
        environment, agent = choose(self.environments, named, request.agent)
        strategy = environment.strategies[agent]
        if strategy == "none":
            raise routing.refuse_unroutable(agent, environment.agents[agent], environment.version)
        route = self.open(request, metadata_routing=strategy in routing.BY_METADATA)
        try:
            job = rollouts.Job(
                environment=environment.name,
                agent=agent,
                agent_type=environment.agents[agent],
                body=routing.routed_row(
                    request.row, strategy, key=route.key, base_url=route.base_url, metadata=route.metadata
                ),
                rollout_id=route.rollout_id,
                timeout_s=request.limits.timeout_s,
            )
            outcome = await self._outcome(environment, job, route)
        finally:
            await route.close()
        if (unasked := environment.unasked(agent, outcome.fields, route.log)) is not None:
            outcome = rollouts.JobResult(results.failed(unasked))
        return pack_calls(rollouts.finished(job, outcome, route.log, started), route, outcome.result)

    async def _outcome(self, environment: Environment, job: rollouts.Job, route: Route) -> rollouts.JobResult:
        """What comes of a job within its time; whatever goes wrong here is its failure alone."""
        place = self._in_process if job.agent in environment.agent_processes else self._on_servers
        try:
            async with asyncio.timeout(job.timeout_s) as deadline:
                return await place(environment, job, route)
        except GymgateError as error:
            return rollouts.JobResult(results.failed(error))
        except Exception as error:
            if deadline.expired() and isinstance(error, TimeoutError):
                return rollouts.JobResult(job.timed_out())
            logger.exception("rollout %s failed", job.rollout_id)
            message = f"the stack's daemon could not run it: {described(error)}"
            return rollouts.JobResult(results.failed(StackLostError(message)))

    def open(self, request: Request, *, metadata_routing: bool = False) -> Route:
        """A route for a rollout, to be closed by the caller."""
        return self.gateway.open(
            request.policy,
            rollout_id=request.rollout_id,
            judges=request.judges,
            judge_policy=request.judge_policy,
            limits=request.limits,
            record_bodies=request.record_bodies,
            metadata_routing=metadata_routing,
        )

    async def _in_process(
        self, environment: Environment, job: rollouts.Job, route: Route
    ) -> rollouts.JobResult:
        """Run the job once a process is free, unless its process or a server it needs dies first."""
        if environment.state == "down":
            await environment.generation()  # which says why
        job.waits_for = (
            f"a free process of agent {job.agent!r}; raise --agent-processes (agent_processes) or the timeout"
        )
        async with environment.agent_processes[job.agent].lease(route) as process:
            return await _while_alive(process, self._on_servers(environment, job, route, process.port))

    async def _on_servers(
        self, environment: Environment, job: rollouts.Job, route: Route, port: int | None = None
    ) -> rollouts.JobResult:
        """Run the job, unless a server it needs dies first; `port` is its agent's, if that is not the usual one."""
        assert self._session is not None
        job.waits_for = "other rollouts to end, because few files may be open; raise `ulimit -n`"
        async with self._places:
            job.waits_for = "the environment's servers"
            generation = await environment.generation()
            url = f"http://127.0.0.1:{port or environment.port(job.agent)}/run"
            with self.gateway.keyless.judges.shared_with(route.judges, environment.judges):
                work = rollouts.run_job(self._session, job, route, url)
                return await _while_alive(generation, work)

    async def _start(self, environment: Environment, limit: asyncio.Semaphore) -> StackStartError | None:
        """Start an environment; return what its servers failed of. Raises everything else."""
        async with limit:
            try:
                await environment.start()
            except StackStartError as error:
                return error
        return None

    def _resolve(self) -> list[tuple[EnvironmentConfig, Path, Runtime]]:
        """Find each environment's config and make its runtime; blocking, minutes on first use."""
        config = self.config
        base = ensure_runtime(config.runtime, progress=self._progress)
        if base.version not in SUPPORTED_NEMO_GYM:
            tested = f"{SUPPORTED_NEMO_GYM[-1]} to {SUPPORTED_NEMO_GYM[0]}"
            self._progress(
                f"warning: gymgate is not tested with nemo-gym {base.version}, only with {tested}; trying it"
            )
        catalog = Catalog(
            base.site, base.version, [Path(root).expanduser() for root in config.component_roots]
        )
        found = []
        for spec in config.environments:
            environment = catalog.find(spec.name)
            self._named.setdefault(environment.name, spec.name)
            chosen = environment.config(spec.config)
            runtime = base
            if requirements := catalog.requirements(environment, chosen):
                runtime = ensure_runtime(config.runtime, requirements, progress=self._progress)
            found.append((spec, chosen.path, runtime))
        return found

    def _host(self, runtime: Runtime) -> Host:
        return Host(
            spawner=lambda: self._fork_servers.spawner(runtime.python),
            ray_address=self._fork_servers.ray_address,
            gateway=self.gateway,
            version=runtime.version,
            site=runtime.site,
            component_roots=self.config.component_roots,
            directory=self.directory,
            cache_dir=gym_cache(),
            programs=self._fork_servers.agents_commands(),
            start_timeout_s=self.config.start_timeout_s,
            max_restarts=self.config.max_restarts,
            restart_window_s=self.config.restart_window_s,
            agent_processes=self.config.agent_processes,
            progress=self._progress,
            models=dict(self.config.models),
        )

    def _watch_for_hangs(self) -> None:
        if given_s := self.config.hang_timeout_s:
            watch = HangWatch(
                lambda: processes_of(self.environments.values(), self._fork_servers.running(), given_s),
                given_s,
            )
            self._exits.callback(asyncio.create_task(watch.run()).cancel)


def places_for_files() -> int:
    """How many rollouts may run at once: as many as can have the sockets of their calls besides their own."""
    raise_file_limit()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(4, (soft - FILES_KEPT) // FILES_PER_ROLLOUT)


async def _while_alive(
    place: Generation | AgentProcess, work: Coroutine[Any, Any, rollouts.JobResult]
) -> rollouts.JobResult:
    """The work's outcome; that of a failed rollout if a server of that place dies meanwhile."""
    task = asyncio.current_task()
    assert task is not None
    place.users.add(task)
    try:
        return await work
    except asyncio.CancelledError:
        if place.error is None or task.uncancel() > 0:
            raise
        return rollouts.JobResult(results.failed(place.error))
    finally:
        place.users.discard(task)


async def _all_or_first_error(work: list[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all; at the first failure cancel the others, wait for them, and raise it."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
