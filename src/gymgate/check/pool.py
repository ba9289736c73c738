"""Several checks at once, each in a process of its own that is watched and, if need be, killed with all it started."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

from gymgate.catalog.model import AGENT_KIND, PACKAGED_KINDS
from gymgate.check.memory import over_limit
from gymgate.check.model import Check, Job
from gymgate.errors import GymgateError, from_wire
from gymgate.runtime import daemon_env
from gymgate.stack.forkserver import descendants

SETUP_TIMEOUT_S = 2400.0
"""Seconds that installing an environment's requirements may take."""
LINE_LIMIT = 1 << 26

Report = Callable[[Job, str], None]
Done = Callable[[Job, Check | GymgateError], None]


async def check_all(
    jobs: Sequence[Job],
    *,
    at_once: int = 1,
    done: Done | None = None,
    progress: Report = lambda job, message: None,
) -> list[Check | GymgateError]:
    """A check for each job, in their order; a `GymgateError` for a job that names no environment.

    `done` hears of each as it ends. Cancelling it ends every process.
    """
    slots = asyncio.Semaphore(at_once)
    results: dict[int, Check | GymgateError] = {}

    async def work(position: int, job: Job) -> None:
        async with slots:
            outcome = await run_job(job, progress)
        results[position] = outcome
        if done is not None:
            done(job, outcome)

    async with asyncio.TaskGroup() as group:
        for position, job in enumerate(jobs):
            group.create_task(work(position, job))
    return [results[position] for position in range(len(jobs))]


async def run_job(job: Job, progress: Report) -> Check | GymgateError:
    """One check in a process of its own."""
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gymgate.check.worker",
        env=_environment(job),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
        limit=LINE_LIMIT,
    )
    watch = asyncio.create_task(over_limit(process.pid, job.memory_gb))
    talk = asyncio.create_task(_talk(process, job, progress))
    try:
        limit = SETUP_TIMEOUT_S + job.timeout_s
        await asyncio.wait([watch, talk], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if talk.done():
            return talk.result() or await _crashed(process, job, started)
        if watch.done():
            return _ended(job, started, f"memory: more than {job.memory_gb:g} GB", watch.result())
        return _failed(job, started, f"not done after {limit:g} s, installing included", "")
    finally:
        for task in (watch, talk):
            task.cancel()
        await asyncio.shield(_kill(process))


def _environment(job: Job) -> dict[str, str]:
    """With the keys of the job's judges, which are read there."""
    keys = [getattr(endpoint, "api_key_env", None) for _, endpoint in job.models]
    return daemon_env([*job.env_vars, *filter(None, keys)])


async def _talk(process: Process, job: Job, progress: Report) -> Check | GymgateError | None:
    """Hand over the job, pass on progress, return the outcome; `None` if the process ends without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(job.model_dump_json().encode())
        process.stdin.close()
    async for line in process.stdout:
        event = orjson.loads(line)
        if "progress" in event:
            progress(job, event["progress"])
        elif "error" in event:
            return from_wire(event["error"])
        else:
            return Check.model_validate(event["check"])
    return None


async def _crashed(process: Process, job: Job, started: float) -> Check:
    assert process.stderr is not None
    text = (await process.stderr.read()).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return _failed(
        job, started, f"the check itself failed: {lines[-1] if lines else 'no message'}", text[-4000:]
    )


def _ended(job: Job, started: float, detail: str, evidence: str) -> Check:
    return _made(job, started, "blocked", detail, evidence, "")


def _failed(job: Job, started: float, detail: str, log: str) -> Check:
    return _made(job, started, "failed", detail, "", log)


def _made(job: Job, started: float, verdict: str, detail: str, evidence: str, log: str) -> Check:
    kind, _, name = job.environment.rpartition("/")
    if name.endswith((".yaml", ".yml")):  # the user's own, by path
        kind, name = "config", Path(name).stem
    elif kind and kind not in (*PACKAGED_KINDS, AGENT_KIND):
        kind = "config"
    return Check.model_validate(
        {
            "environment": name,
            "kind": kind or "resources_servers",
            "version": job.version,
            "verdict": verdict,
            "detail": detail,
            "evidence": evidence,
            "log_tail": log,
            "seconds": round(time.monotonic() - started, 1),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "settings": job.settings,
        }
    )


async def _kill(process: Process) -> None:
    """End the worker and everything below it, its stack's daemon included."""
    family = [process.pid, *descendants(process.pid)] if process.returncode is None else []
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()
