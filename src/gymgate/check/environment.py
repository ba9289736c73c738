"""Checking one environment, in a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gymgate.catalog import Catalog, DataFile, EnvConfig, Environment, Need
from gymgate.catalog.rows import kind_of_file
from gymgate.check import evidence
from gymgate.check.judges import RecordedJudge, serving
from gymgate.check.memory import rss
from gymgate.check.model import Check, Job
from gymgate.check.recordings import Samples, config_for, packaged_rows, read_samples
from gymgate.check.rows import Rows, needed, summarised
from gymgate.config import EnvironmentConfig, HTTPEndpoint, RuntimeConfig, StackConfig
from gymgate.errors import ConfigError, GymgateError, NeedMissingError, SetupError, StackStartError
from gymgate.runtime import ensure_runtime
from gymgate.stack import acquire
from gymgate.stack.forkserver import descendants

Progress = Callable[[str], None]


class EnvironmentCheck:
    """From a job to a verdict; every failure of the environment becomes one."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self._progress = progress
        self._facts: dict[str, Any] = {}
        self._hints: tuple[Need, ...] = ()
        self._peak_gb = 0.0
        self._left_out: evidence.Missing | None = None
        self._started = time.monotonic()

    async def run(self) -> Check:
        """Never raises for what is wrong with the environment; `ConfigError` if there is none of that name."""
        job = self.job
        runtime = RuntimeConfig(version=job.version)
        base = await asyncio.to_thread(ensure_runtime, runtime, progress=self._progress)
        catalog = Catalog(base.site, base.version)
        environment = with_data(catalog.find(job.environment))
        self._facts = {"environment": environment.name, "kind": environment.kind, "version": base.version}
        with TemporaryDirectory(prefix="gymgate-check-") as directory:
            samples = await asyncio.to_thread(read_samples, environment, Path(directory))
            self._facts["broken"] = samples.broken
            if lacking := self._lacking(environment, samples):
                return self._verdict(verdict="incomplete", detail=lacking)
            config, notes = config_for(environment, samples.samples)
            self._hints = config.needs
            self._facts |= {
                "config": config.name,
                "agents": tuple(dict.fromkeys(agent.type for agent in config.agents)),
                "needs": config.need_kinds,
                "notes": tuple(notes),
            }
            try:
                runtime = await asyncio.to_thread(self._install, catalog, environment, config)
            except SetupError as error:
                return self._not_installed(error)
            self._progress("checking")
            try:
                async with asyncio.timeout(job.timeout_s):
                    return await self._checked(environment, config, samples, runtime)
            except TimeoutError:
                return self._verdict(
                    verdict="failed", detail=f"not done after {job.timeout_s:g} s", evidence=""
                )

    def _lacking(self, environment: Environment, samples: Samples) -> str:
        """What the release does not ship, without which nothing can be run."""
        if not environment.configs:
            return "no config"
        if not any(config.agents for config in environment.configs):
            return "no agent in any config"
        if not samples.samples and not packaged_rows(environment):
            if samples.broken:
                return f"no data: every recorded line is broken ({samples.broken[0]})"
            return "no data"
        return ""

    def _install(self, catalog: Catalog, environment: Environment, config: EnvConfig) -> RuntimeConfig:
        """The runtime with what the environment requires; without what no index has, if that cannot be fetched:
        not every agent or task of an environment needs it, and one that does says so."""
        runtime = RuntimeConfig(version=self.job.version)
        requirements = catalog.requirements(environment, config)
        try:
            ensure_runtime(runtime, requirements, progress=self._progress)
        except SetupError as error:
            fetched = [line for line in requirements if "://" in line]
            need = evidence.setup_need(str(error))
            if fetched and need is None and "cannot reach the package index" in str(error):
                need = evidence.Missing("download", fetched[0], str(error)[:240])
            if not fetched or need is None or need.kind not in ("git", "download"):
                raise
            left = set(requirements) - set(fetched)
            installed = ensure_runtime(runtime, left, progress=self._progress)
            self._left_out = need
            self._facts["notes"] += tuple(f"without {line}, which cannot be fetched" for line in fetched)
            return RuntimeConfig(version=self.job.version, interpreter=str(installed.python))
        return runtime

    async def _checked(
        self, environment: Environment, config: EnvConfig, samples: Samples, runtime: RuntimeConfig
    ) -> Check:
        judge = RecordedJudge(environment.name)
        watcher = asyncio.create_task(self._watch_memory())
        try:
            async with (
                serving(judge) as endpoint,
                acquire(self._stack_config(config, runtime, endpoint)) as stack,
            ):
                status = await stack.status()
                logs = Path(status["environments"][self.job.environment]["logs"])
                rows = Rows(stack, self.job, environment, judge, logs, config.needs)
                return self._verdict(**summarised(await rows.check(samples), rows, environment, self.job))
        except GymgateError as error:
            return self._not_started(error)
        finally:
            watcher.cancel()

    async def _watch_memory(self) -> None:
        while True:
            self._peak_gb = max(self._peak_gb, rss(descendants(os.getpid())))
            await asyncio.sleep(1.0)

    def _stack_config(self, config: EnvConfig, runtime: RuntimeConfig, judge: HTTPEndpoint) -> StackConfig:
        job = self.job
        given = dict(job.models)
        models = {"*": judge, **given}
        return StackConfig(
            environments=(
                EnvironmentConfig(name=job.environment, config=config.name, overrides=job.overrides),
            ),
            runtime=runtime,
            models=tuple(sorted(models.items())),
            start_timeout_s=job.start_timeout_s,
            max_restarts=1,
        )

    def _not_installed(self, error: SetupError) -> Check:
        need = evidence.setup_need(str(error))
        if need is None:
            return self._verdict(verdict="failed", detail=f"SetupError: {error}")
        return self._verdict(verdict="blocked", detail=str(need), evidence=need.evidence)

    def _not_started(self, error: GymgateError) -> Check:
        """What a stack that did not come up says of the environment."""
        log = str(getattr(error, "log_tail", None) or "")
        if isinstance(error, NeedMissingError):
            return self._verdict(
                verdict="blocked", detail=f"config: a value for {error.need}", evidence=str(error)
            )
        need = evidence.missing_in(log, str(error), hints=self._hints)
        if need is not None and need.kind == "package" and self._left_out is not None:
            return self._verdict(verdict="blocked", detail=str(self._left_out), evidence=need.evidence)
        if need is not None:
            return self._verdict(**needed(need))
        if isinstance(error, StackStartError) and "was not up after" in str(error):
            kinds = ", ".join(self._facts.get("needs", ())) or "none"
            return self._verdict(
                verdict="blocked",
                detail=f"start: not up within {self.job.start_timeout_s:g} s, with {self._peak_gb:.1f} GB in use "
                f"(needs read from its files: {kinds})",
                evidence=_last_lines(log, 1) or str(error),
            )
        if isinstance(error, StackStartError) and "(exit status 0)" in str(error):
            detail = f"the entrypoint of server {error.server!r} starts no server: a base for others"
            return self._verdict(verdict="incomplete", detail=detail)
        if isinstance(error, ConfigError):
            return self._verdict(verdict="incomplete", detail=f"config: {error}")
        return self._verdict(verdict="failed", detail=f"{type(error).__name__}: {error}", log_tail=log)

    def _verdict(self, **values: Any) -> Check:
        return Check(
            **{
                **self._facts,
                "settings": self.job.settings,
                "seconds": round(time.monotonic() - self._started, 1),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                **values,
            }
        )


def with_data(environment: Environment) -> Environment:
    """A user's config file in `NAME/configs`: with the files of `NAME/data`, recordings among them."""
    directory = environment.path.parent / "data"
    if environment.kind != "config" or environment.path.name != "configs" or not directory.is_dir():
        return environment
    files = (DataFile(path.stem, path, kind_of_file(path)) for path in sorted(directory.glob("*.jsonl")))
    return dataclasses.replace(environment, data=tuple(files))


def _last_lines(text: str, count: int) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


async def check_environment(job: Job, progress: Progress = lambda _: None) -> Check:
    """Check one environment in this process; see `EnvironmentCheck.run`."""
    return await EnvironmentCheck(job, progress).run()


__all__: Sequence[str] = ("EnvironmentCheck", "check_environment")
