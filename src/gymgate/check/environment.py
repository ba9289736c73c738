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

import orjson

from gymgate.catalog import Catalog, DataFile, EnvConfig, Environment, Need
from gymgate.catalog.model import kind_of_file
from gymgate.check import evidence
from gymgate.check.causes import Setting, replayed_with
from gymgate.check.judges import RecordedJudge, serving
from gymgate.check.memory import rss
from gymgate.check.model import Check, Job
from gymgate.check.placeholders import lacking, named, placeholders
from gymgate.check.recordings import Samples, config_for, other_configs, packaged_rows, read_samples
from gymgate.check.rows import Rows
from gymgate.check.summary import needed, summarised
from gymgate.config import EnvironmentConfig, HTTPEndpoint, RuntimeConfig, StackConfig
from gymgate.errors import ConfigError, GymgateError, NeedMissingError, SetupError, StackStartError
from gymgate.runtime import ensure_runtime
from gymgate.stack import acquire
from gymgate.stack.forkserver import descendants

Progress = Callable[[str], None]

OTHER_CONFIGS = 2
"""Configs that are tried where the first gave no reward."""


class EnvironmentCheck:
    """From a job to a verdict; every failure of the environment becomes one."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self._progress = progress
        self._facts: dict[str, Any] = {}
        self._hints: tuple[Need, ...] = ()
        self._peak_gb = 0.0
        self._left_out: evidence.Missing | None = None
        self._made_up: tuple[Setting, ...] = ()
        """Values that were given because the config has none."""
        self._replayed_with: tuple[Setting, ...] = ()
        self._scratch = Path()
        self._began = time.monotonic()

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
            self._replayed_with = replayed_with(environment.name, base.version)
            if lacking := self._lacking(environment, samples):
                return self._verdict(verdict="incomplete", detail=lacking)
            self._scratch = Path(directory)
            config, notes = config_for(environment, samples.samples)
            check = await self._of_config(environment, config, samples, notes)
            if check.rewarded or check.verdict in ("match", "differs", "failed"):
                return check
            for other in other_configs(environment, config, OTHER_CONFIGS):
                second = await self._of_config(environment, other, Samples((), (), 0), [])
                if second.rewarded or (second.rewarded_by_stand_in and not check.rewarded_by_stand_in):
                    return _with_reward_of(check, second, self._since())
            return check

    async def _of_config(
        self, environment: Environment, config: EnvConfig, samples: Samples, notes: Sequence[str]
    ) -> Check:
        """What comes of one of the environment's configs."""
        job = self.job
        self._hints, self._left_out, self._made_up = config.needs, None, ()
        self._facts |= {
            "config": config.name,
            "agents": tuple(dict.fromkeys(agent.type for agent in config.agents)),
            "needs": config.need_kinds,
            "notes": tuple(notes),
        }
        try:
            runtime = await asyncio.to_thread(self._install, config)
        except SetupError as error:
            return self._not_installed(error)
        self._progress("checking")
        try:
            async with asyncio.timeout(job.timeout_s):
                return await self._checked(environment, config, samples, runtime)
        except TimeoutError:
            return self._verdict(verdict="failed", detail=f"not done after {job.timeout_s:g} s", evidence="")

    def _lacking(self, environment: Environment, samples: Samples) -> str:
        """What the release does not ship, without which nothing can be run."""
        if not environment.configs:
            return "no config"
        if not any(config.agents for config in environment.configs):
            return "no agent in any config"
        if not samples.samples and not packaged_rows(environment):
            if raw := [file.name for file in environment.data if file.kind == "raw"]:
                ready = f"`gymgate data prepare {_full_name(environment)}` makes those that can be run"
                return f"no data: the rows of {', '.join(raw)} are raw and need a prompt config; {ready}"
            if samples.broken:
                return f"no data: every recorded line is broken ({samples.broken[0]})"
            return "no data"
        return ""

    def _install(self, config: EnvConfig) -> RuntimeConfig:
        """The runtime with what the environment requires; without what cannot be had, if that is so: not every
        agent or task of an environment needs it, and one that does says so."""
        runtime = RuntimeConfig(version=self.job.version)
        left: list[str] = []
        while True:
            wanted = [line for line in config.requirements if line not in left]
            try:
                installed = ensure_runtime(runtime, wanted, progress=self._progress)
            except SetupError as error:
                need = evidence.setup_need(str(error)) or self._no_source(error, wanted)
                more = evidence.unobtainable(wanted, need, str(error)) if need is not None else []
                if need is None or not more:
                    raise
                left += more
                self._left_out = self._left_out or need
                self._facts["notes"] += tuple(f"without {line}: {_why(need)}" for line in more)
                continue
            return (
                RuntimeConfig(version=self.job.version, interpreter=str(installed.python))
                if left
                else runtime
            )

    def _no_source(self, error: SetupError, wanted: Sequence[str]) -> evidence.Missing | None:
        """A requirement that is fetched by its address, where the index cannot be reached with it."""
        fetched = [line for line in wanted if "://" in line]
        if not fetched or "cannot reach the package index" not in str(error):
            return None
        return evidence.Missing("download", fetched[0], str(error)[:240])

    async def _checked(
        self, environment: Environment, config: EnvConfig, samples: Samples, runtime: RuntimeConfig
    ) -> Check:
        watcher = asyncio.create_task(self._watch_memory())
        try:
            while True:
                try:
                    return await self._started(environment, config, samples, runtime)
                except GymgateError as error:
                    if not self._make_up(error, config):
                        return self._not_started(error)
        finally:
            watcher.cancel()

    async def _started(
        self, environment: Environment, config: EnvConfig, samples: Samples, runtime: RuntimeConfig
    ) -> Check:
        judge = RecordedJudge(environment.name)
        async with (
            serving(judge) as endpoint,
            acquire(self._stack_config(config, runtime, endpoint)) as stack,
        ):
            status = await stack.status()
            logs = Path(status["environments"][self.job.environment]["logs"])
            rows = Rows(stack, self.job, environment, config, judge, logs, self._made_up)
            return self._verdict(**summarised(await rows.check(samples), rows, environment, self.job))

    def _make_up(self, error: GymgateError, config: EnvConfig) -> bool:
        """Whether the stack may start with made-up values for what it did not start for want of."""
        known = {key for key, _ in self._made_up} | {key for key, _ in self.job.overrides}
        more = placeholders([key for key in lacking(error, config) if key not in known], self._scratch)
        self._made_up += tuple(more)
        return bool(more)

    async def _watch_memory(self) -> None:
        while True:
            self._peak_gb = max(self._peak_gb, rss(descendants(os.getpid())))
            await asyncio.sleep(1.0)

    def _stack_config(self, config: EnvConfig, runtime: RuntimeConfig, judge: HTTPEndpoint) -> StackConfig:
        job = self.job
        models = {"*": judge, **dict(job.models)}
        overrides = {**dict(self._replayed_with), **dict(self._made_up), **dict(job.overrides)}
        return StackConfig(
            environments=(
                EnvironmentConfig(
                    name=job.environment, config=config.name, overrides=tuple(overrides.items())
                ),
            ),
            runtime=runtime,
            models=tuple(sorted(models.items())),
            env_vars=job.env_vars,
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
            return self._verdict(**needed(need, beside=self._containers(need)))
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

    def _containers(self, need: evidence.Missing) -> str:
        """For a value that the config lacks: what else its files say it takes, if that is a container."""
        found = [hint.detail for hint in self._hints if hint.kind == "docker"]
        return f"; then docker: {found[0]}" if need.kind == "config" and found else ""

    def _since(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def _verdict(self, **values: Any) -> Check:
        notes = list(self._facts.get("notes", ()))
        if self._replayed_with:
            told = " ".join(
                f"--set {key}={orjson.dumps(value).decode()}" for key, value in self._replayed_with
            )
            notes.append(f"replayed with {told}")
        if self._made_up:
            notes.append(f"with a placeholder for {named(self._made_up)}")
        values["notes"] = tuple(notes)
        return Check(
            **{
                **self._facts,
                "settings": self.job.settings,
                "seconds": self._since(),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                **values,
            }
        )


def _full_name(environment: Environment) -> str:
    return environment.name if environment.kind == "config" else f"{environment.kind}/{environment.name}"


def _why(need: evidence.Missing) -> str:
    """Why a requirement was left out: requirements in conflict are named."""
    return str(need) if need.kind in ("conflict", "package") else f"it cannot be fetched ({need.kind})"


def _with_reward_of(check: Check, other: Check, seconds: float) -> Check:
    """The verdict on the config that was recorded, with the reward that another of the environment's gave."""
    note = f"a packaged row gets a reward with config {other.config}"
    return check.model_copy(
        update={
            "rewarded": other.rewarded,
            "rewarded_by_stand_in": other.rewarded_by_stand_in,
            "notes": (*check.notes, note, *other.notes),
            "seconds": seconds,
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
