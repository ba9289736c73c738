"""Check one environment: `python -m gymgate.quality.environment` is the process that `parallel` starts for each."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.core.errors import GymgateError
from gymgate.gym.catalog import Catalog, EnvConfig, Environment
from gymgate.gym.inside.processes import PR_SET_PDEATHSIG, prctl
from gymgate.gym.runtime import ensure_runtime
from gymgate.gym.runtime.command import Progress
from gymgate.quality.diagnosis import start_diagnosis
from gymgate.quality.known import replay_settings
from gymgate.quality.model import CheckRequest, CheckResult, Diagnosis
from gymgate.quality.record import row_quality
from gymgate.quality.record.context import MeasurementContext
from gymgate.quality.record.measure import measure_all
from gymgate.quality.recorded_models import RecordedJudge, serve_judge
from gymgate.quality.recordings import RecordedRow, config_for, packaged_rows, read_recordings, with_own_data
from gymgate.quality.replay import Replayer, ServerLogs
from gymgate.quality.sections import NOT_HERE, Oracle
from gymgate.quality.verdict import summarize
from gymgate.stack import acquire

_OWN_FAULTS = ("package", "file")
"""Missing needs that a user's own environment is to bring along itself."""


async def check_environment(request: CheckRequest, progress: Progress = lambda _: None) -> CheckResult:
    """Check one environment in this process. Whatever is wrong with the environment becomes its result; raises
    `ConfigError` if there is no environment or config of that name."""
    began = time.monotonic()
    runtime = await asyncio.to_thread(ensure_runtime, request.stack.runtime, progress=progress)
    catalog = Catalog(runtime.site, runtime.version)
    environment = with_own_data(catalog.find(request.name, request.environment.config))
    recorded, broken = await asyncio.to_thread(read_recordings, environment)
    check = request.new_result(
        environment=environment.name,
        kind=environment.kind,
        nemo_gym=runtime.version,
        verdict="incomplete",
        broken=tuple(broken),
    )
    if request.measure:
        rows = await asyncio.to_thread(row_quality.of_environment, environment, request.environment.config)
        check = check.model_copy(update={"data": rows})
    if lacking := _lacking(environment, recorded, broken):
        is_fetched = environment.kind != "config" and lacking.startswith("no data") and not broken
        oracle = Oracle(reason=NOT_HERE) if request.measure and is_fetched else None
        return request.finish(check.model_copy(update={"detail": lacking, "oracle": oracle}), began)
    config, notes = config_for(environment, recorded, request.environment.config)
    if settings := replay_settings(environment.name):
        options = (f"--set {key}={codec.dumps(value).decode()}" for key, value in settings)
        notes.append(f"replayed with {' '.join(options)}")
    check = check.model_copy(
        update={
            "config": config.name,
            "agents": tuple(dict.fromkeys(agent.type for agent in config.agents)),
            "needs": config.need_kinds,
            "notes": tuple(notes),
        }
    )
    check = await _run(request, check, environment, config, recorded, progress)
    if check.kind == "config" and check.need in _OWN_FAULTS:
        check = check.model_copy(update={"verdict": "failed", "need": ""})
    if check.verdict != "failed":
        check = check.model_copy(update={"traceback": ""})
    return request.finish(check, began)


def _lacking(environment: Environment, recorded: Sequence[RecordedRow], broken: Sequence[str]) -> str:
    """Return what the release lacks for anything to run; empty if everything is there."""
    if not environment.configs:
        return "no config"
    if not any(config.agents for config in environment.configs):
        return "no agent in any config"
    if recorded or packaged_rows(environment):
        return ""
    default = environment.config()
    if owners := default.environment_servers:
        builds = "".join(f"; {need.detail}" for need in default.needs if "built from git" in need.detail)
        return (
            f"no data that can be run: environment server {owners[0].name!r} makes the conversations itself, of rows without "
            f"responses_create_params{builds}"
        )
    if raw := [file.name for file in environment.data if file.kind == "raw"]:
        name = environment.name if environment.kind == "config" else environment.known_as
        ready = f"`gymgate data prepare {name}` makes those that can be run"
        return f"no data: the rows of {', '.join(raw)} are raw and need a prompt config; {ready}"
    return f"no data: every recorded line is broken ({broken[0]})" if broken else "no data"


async def _run(
    request: CheckRequest,
    check: CheckResult,
    environment: Environment,
    config: EnvConfig,
    recorded: Sequence[RecordedRow],
    progress: Progress,
) -> CheckResult:
    """Install, start and replay; return the result with the verdict and the measurements."""
    judge = RecordedJudge(environment.name)
    try:
        await asyncio.to_thread(ensure_runtime, request.stack.runtime, config.requirements, progress=progress)
        progress("checking")
        began = time.monotonic()
        async with (
            asyncio.timeout(request.timeout_s) as deadline,
            serve_judge(judge) as endpoint,
            acquire(_stack_config(request, environment, config, endpoint)) as stack,
        ):
            ready_s = time.monotonic() - began
            [running] = (await stack.status())["environments"].values()
            logs = ServerLogs(Path(running["logs"]))
            replayer = Replayer(stack, request, environment, config, judge, logs)
            results = await replayer.replay(recorded) if request.replay else []
            check = summarize(check, results, replayer, environment)
            if request.measure:
                deadline.reschedule(None)  # each measurement has its own
                context = MeasurementContext(
                    stack, request, environment, config, replayer, judge, recorded, results, ready_s
                )
                check = await measure_all(check, context, progress)
            return check
    except GymgateError as error:
        return check.concluded(start_diagnosis(error, config, request.stack.start_timeout_s))
    except TimeoutError:
        return check.concluded(Diagnosis("failed", f"not done after {request.timeout_s:g} s"))


def _stack_config(
    request: CheckRequest, environment: Environment, config: EnvConfig, judge: HTTPEndpoint
) -> StackConfig:
    overrides = {**dict(replay_settings(environment.name)), **dict(request.environment.overrides)}
    changes = {"config": request.environment.config or config.name, "overrides": tuple(overrides.items())}
    return request.stack.model_copy(
        update={
            "environments": (request.environment.model_copy(update=changes),),
            "models": tuple(sorted({"*": judge, **dict(request.stack.models)}.items())),
            "max_restarts": 1,
        }
    )


def main() -> int:
    """Check the request on stdin; write progress and the outcome to stdout as events, one JSON line each."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its stack ends with it
    request = CheckRequest.model_validate_json(sys.stdin.buffer.read())

    def emit(event: str, value: Any) -> None:
        sys.stdout.buffer.write(codec.dumps({event: value}) + b"\n")
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
