"""Check one environment: `python -m gymgate.check.environment` is the process that `processes` starts for each."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from gymgate.catalog import Catalog, DataFile, EnvConfig, Environment
from gymgate.catalog.model import kind_of_file
from gymgate.check.answers import RecordedJudge, serving
from gymgate.check.known import replayed_with
from gymgate.check.model import CheckRequest, CheckResult, Diagnosis
from gymgate.check.needs import (
    MissingNeed,
    missing_in,
    names_of,
    placeholders,
    setup_need,
    unobtainable,
    unset_keys,
)
from gymgate.check.record.bench import Bench
from gymgate.check.record.measure import measured
from gymgate.check.recordings import RecordedRow, config_for, other_configs, packaged_rows, read_recordings
from gymgate.check.replay import Replayer, ServerLogs
from gymgate.check.summary import summarize
from gymgate.check.tracebacks import last_traceback
from gymgate.config import EnvironmentConfig, HTTPEndpoint, RuntimeConfig, Settings, StackConfig
from gymgate.errors import ConfigError, GymgateError, NeedMissingError, SetupError, StackStartError
from gymgate.runtime import ensure_runtime
from gymgate.runtime.command import Progress
from gymgate.stack import acquire
from gymgate.stack.forkserver.processes import PR_SET_PDEATHSIG, prctl

OTHER_CONFIGS = 2
"""How many other configs are tried if the first gave no reward."""
_OWN_FAULTS = ("package: ", "file: ")
"""Missing needs that a user's own environment is to bring along itself."""


async def check_environment(request: CheckRequest, progress: Progress = lambda _: None) -> CheckResult:
    """Check one environment in this process. Whatever is wrong with the environment becomes its result; raises
    `ConfigError` if there is no environment of that name."""
    began = time.monotonic()
    runtime = await asyncio.to_thread(ensure_runtime, request.runtime, progress=progress)
    catalog = Catalog(runtime.site, runtime.version)
    environment = _with_own_data(catalog.find(request.environment))
    recorded, broken = await asyncio.to_thread(read_recordings, environment)
    about = {"environment": environment.name, "kind": environment.kind, "version": runtime.version}
    result = partial(request.result, began, **about, broken=tuple(broken))
    if lacking := _lacking(environment, recorded, broken):
        return result(verdict="incomplete", detail=lacking)
    config, notes = config_for(environment, recorded)
    with TemporaryDirectory(prefix="gymgate-check-") as scratch:
        check = partial(_ConfigCheck, request, environment, progress, Path(scratch))
        first = result(**await check(config, recorded, notes).run())
        if first.rewarded or first.verdict in ("match", "differs", "failed"):
            return first
        for other in other_configs(environment, config, OTHER_CONFIGS):
            second = result(**await check(other, (), [], measures=False).run())
            if second.rewarded or (second.rewarded_by_stand_in and not first.rewarded_by_stand_in):
                return _with_reward_of(first, second)
    return first


def _with_own_data(environment: Environment) -> Environment:
    """A user's config file in `NAME/configs` gets the files of `NAME/data`, recordings among them."""
    directory = environment.path.parent / "data"
    if environment.kind != "config" or environment.path.name != "configs" or not directory.is_dir():
        return environment
    files = (DataFile(path.stem, path, kind_of_file(path)) for path in sorted(directory.glob("*.jsonl")))
    return dataclasses.replace(environment, data=tuple(files))


def _lacking(environment: Environment, recorded: Sequence[RecordedRow], broken: Sequence[str]) -> str:
    """Return what the release lacks for anything to run; empty if everything is there."""
    if not environment.configs:
        return "no config"
    if not any(config.agents for config in environment.configs):
        return "no agent in any config"
    if recorded or packaged_rows(environment):
        return ""
    if raw := [file.name for file in environment.data if file.kind == "raw"]:
        name = environment.name if environment.kind == "config" else environment.known_as
        ready = f"`gymgate data prepare {name}` makes those that can be run"
        return f"no data: the rows of {', '.join(raw)} are raw and need a prompt config; {ready}"
    return f"no data: every recorded line is broken ({broken[0]})" if broken else "no data"


def _with_reward_of(result: CheckResult, other: CheckResult) -> CheckResult:
    """The result for the recorded config, with the reward that another config gave."""
    note = f"a packaged row gets a reward with config {other.config}"
    return result.model_copy(
        update={
            "rewarded": other.rewarded,
            "rewarded_by_stand_in": other.rewarded_by_stand_in,
            "notes": (*result.notes, note, *other.notes),
            "seconds": other.seconds,
        }
    )


@dataclasses.dataclass
class _ConfigCheck:
    """Installs and starts one of an environment's configs and replays recordings on it."""

    request: CheckRequest
    environment: Environment
    progress: Progress
    scratch: Path
    config: EnvConfig
    recorded: Sequence[RecordedRow]
    notes: list[str]
    measures: bool = True
    left_out: MissingNeed | None = None
    """Why a requirement was not installed."""
    made_up: Settings = ()
    """Values that the config lacks."""

    async def run(self) -> dict[str, Any]:
        """Return fields of the result."""
        fields = self._blamed(await self._found())
        notes = list(self.notes)
        if replayed := self._replayed_with():
            settings = " ".join(f"--set {key}={orjson.dumps(value).decode()}" for key, value in replayed)
            notes.append(f"replayed with {settings}")
        if self.made_up:
            notes.append(f"with a placeholder for {names_of(self.made_up)}")
        return {
            "config": self.config.name,
            "agents": tuple(dict.fromkeys(agent.type for agent in self.config.agents)),
            "needs": self.config.need_kinds,
            "notes": tuple(notes),
            **fields,
        }

    def _blamed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields with `failed` where an environment of the user's own lacks a module or a file: that is its fault."""
        is_lacking = fields["detail"].startswith(_OWN_FAULTS) and self.left_out is None
        if fields["verdict"] == "blocked" and is_lacking and self.environment.kind == "config":
            fields = {**fields, "verdict": "failed"}
        return fields if fields["verdict"] == "failed" else {**fields, "traceback": ""}

    async def _found(self) -> dict[str, Any]:
        try:
            runtime = await asyncio.to_thread(self._install)
            self.progress("checking")
            async with asyncio.timeout(self.request.timeout_s) as deadline:
                return await self._started(runtime, deadline)
        except SetupError as error:
            need = setup_need(str(error))
            return (need.diagnosis if need else Diagnosis("failed", f"SetupError: {error}"))._asdict()
        except TimeoutError:
            return Diagnosis("failed", f"not done after {self.request.timeout_s:g} s")._asdict()

    def _install(self) -> RuntimeConfig:
        """Return the runtime with the environment's requirements. Those that cannot be had are left out, because not
        every agent or task of an environment needs all of them, and the one that does fails with a message."""
        runtime = self.request.runtime
        wanted = list(self.config.requirements)
        while True:
            try:
                installed = ensure_runtime(runtime, wanted, progress=self.progress)
            except SetupError as error:
                need = setup_need(str(error)) or _unreachable_source(error, wanted)
                leave = unobtainable(wanted, need, str(error)) if need is not None else []
                if need is None or not leave:
                    raise
                wanted = [line for line in wanted if line not in leave]
                self.left_out = self.left_out or need
                self.notes += [f"without {line}: {need.reason_left_out}" for line in leave]
                continue
            if not self.left_out:
                return runtime
            return RuntimeConfig(version=self.request.version, interpreter=str(installed.python))

    async def _started(self, runtime: RuntimeConfig, deadline: asyncio.Timeout) -> dict[str, Any]:
        """Start and replay; again with made-up values if the config lacks some."""
        while True:
            try:
                return await self._replay(runtime, deadline)
            except GymgateError as error:
                known = dict((*self.made_up, *self.request.overrides))
                keys = [key for key in unset_keys(error, self.config) if key not in known]
                more = placeholders(keys, self.scratch)
                if not more:
                    return self._not_started(error)._asdict()
                self.made_up = (*self.made_up, *more)

    async def _replay(self, runtime: RuntimeConfig, deadline: asyncio.Timeout) -> dict[str, Any]:
        request, judge = self.request, RecordedJudge(self.environment.name)
        began = time.monotonic()
        async with (
            serving(judge) as endpoint,
            acquire(self._stack_config(runtime, endpoint)) as stack,
        ):
            ready_s = time.monotonic() - began
            status = await stack.status()
            logs = ServerLogs(Path(status["environments"][request.environment]["logs"]))
            replayer = Replayer(stack, request, self.environment, self.config, judge, logs)
            results = await replayer.replay(self.recorded)
            fields = summarize(results, replayer, self.environment, request, self.made_up)
            if request.record and self.measures:
                deadline.reschedule(None)  # each measurement has its own
                bench = Bench(
                    stack,
                    request,
                    self.environment,
                    self.config,
                    replayer,
                    judge,
                    self.recorded,
                    results,
                    ready_s,
                )
                fields["sections"] = await measured(bench, self.progress)
            return fields

    def _stack_config(self, runtime: RuntimeConfig, judge: HTTPEndpoint) -> StackConfig:
        request = self.request
        overrides = {**dict(self._replayed_with()), **dict(self.made_up), **dict(request.overrides)}
        environment = EnvironmentConfig(
            name=request.environment,
            config=self.config.name,
            sandbox=request.sandbox,
            routing=request.routing,
            overrides=tuple(overrides.items()),
        )
        return StackConfig(
            environments=(environment,),
            runtime=runtime,
            models=tuple(sorted({"*": judge, **dict(request.models)}.items())),
            env_vars=request.env_vars,
            start_timeout_s=request.start_timeout_s,
            state_dir=request.logs,
            max_restarts=1,
        )

    def _replayed_with(self) -> Settings:
        return replayed_with(self.environment.name)

    def _not_started(self, error: GymgateError) -> Diagnosis:
        """Say why the stack did not come up."""
        log = str(getattr(error, "log_tail", None) or "")
        return self._reason_not_started(error, str(error), log)._replace(traceback=last_traceback(log))

    def _reason_not_started(self, error: GymgateError, text: str, log: str) -> Diagnosis:
        if isinstance(error, NeedMissingError):
            sandbox = error.need == "sandbox"
            lacks = "docker: a sandbox provider" if sandbox else f"config: a value for {error.need}"
            return Diagnosis("blocked", lacks, text)
        if need := missing_in(log, text, hints=self.config.needs):
            if need.kind == "package" and self.left_out is not None:
                return Diagnosis("blocked", str(self.left_out), need.evidence)
            # For a missing config value: the container that the environment's files say it needs besides.
            docker = [hint.detail for hint in self.config.needs if hint.kind == "docker"]
            then = f"; then docker: {docker[0]}" if need.kind == "config" and docker else ""
            return need.diagnosis._replace(detail=need.diagnosis.detail + then)
        if isinstance(error, StackStartError) and error.timed_out:
            timeout = f"start: not up within {self.request.start_timeout_s:g} s"
            kinds = ", ".join(self.config.need_kinds) or "none"
            lines = [line for line in log.splitlines() if line.strip()]
            return Diagnosis(
                "blocked", f"{timeout} (needs read from its files: {kinds})", lines[-1] if lines else text
            )
        if isinstance(error, StackStartError) and error.exit_status == 0:
            return Diagnosis(
                "incomplete", f"the entrypoint of server {error.server!r} starts no server: a base for others"
            )
        if isinstance(error, ConfigError):
            return Diagnosis("incomplete", f"config: {error}")
        return Diagnosis("failed", f"{type(error).__name__}: {error}", log_tail=log)


def _unreachable_source(error: SetupError, wanted: Sequence[str]) -> MissingNeed | None:
    """Return a requirement given by its address, if the package index cannot be reached with it."""
    fetched = [line for line in wanted if "://" in line]
    if error.kind != "network" or not fetched:
        return None
    return MissingNeed("download", fetched[0], str(error)[:240])


def main() -> int:
    """Check the request on stdin; write progress and the outcome to stdout as events, one JSON line each."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its stack ends with it
    request = CheckRequest.model_validate_json(sys.stdin.buffer.read())

    def emit(event: str, value: Any) -> None:
        sys.stdout.buffer.write(orjson.dumps({event: value}) + b"\n")
        sys.stdout.buffer.flush()

    try:
        check = asyncio.run(check_environment(request, partial(emit, "progress")))
    except GymgateError as error:
        emit("error", error.to_wire())
        return 1
    emit("check", check.model_dump(mode="json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
