"""Several checks at once, each in its own process.

That is killed with everything it started if it takes too much time or memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

from gymgate.core import codec
from gymgate.core.errors import GymgateError, from_wire
from gymgate.core.interpreter import module_command
from gymgate.core.task_groups import task_group
from gymgate.gym.inside.forkserver import descendants, proportional_bytes
from gymgate.gym.runtime import daemon_env
from gymgate.quality.model import CheckRequest, CheckResult, Diagnosis
from gymgate.stack.wire import reveal

SETUP_TIMEOUT_S = 2400.0
"""Seconds that installing an environment's requirements may take."""
UNCOUNTED_ROWS = 100
"""Rows that a check with a model may take the time of, if their number is not limited."""
LINE_LIMIT = 1 << 26
MEMORY_POLL_S = 1.0
ALIVE_S = 30.0
"""Seconds until a check says that it goes on; it says so again after twice the time."""

OnProgress = Callable[[CheckRequest, str], None]
OnDone = Callable[[CheckRequest, CheckResult | GymgateError], None]


async def check_all(
    requests: Sequence[CheckRequest],
    *,
    at_once: int = 1,
    done: OnDone = lambda request, outcome: None,
    progress: OnProgress = lambda request, message: None,
) -> list[CheckResult | GymgateError]:
    """A result for each request, in their order; a `GymgateError` for one that names no environment.

    `done` is called as each check ends; an error of it ends the other checks and is raised. Cancelling this ends every process.
    """
    free = asyncio.Semaphore(at_once)

    async def check(request: CheckRequest) -> CheckResult | GymgateError:
        async with free:
            outcome = await check_in_process(request, progress)
        done(request, outcome)
        return outcome

    async with task_group() as group:
        tasks = [group.create_task(check(request)) for request in requests]
    return [task.result() for task in tasks]


async def check_in_process(request: CheckRequest, progress: OnProgress) -> CheckResult | GymgateError:
    """One check in a process of its own."""
    began = time.monotonic()
    endpoints = [request.policy, *(endpoint for _, endpoint in request.stack.models)]
    judge_keys = [getattr(endpoint, "api_key_env", None) for endpoint in endpoints]
    process = await asyncio.create_subprocess_exec(
        *module_command("gymgate.quality.environment"),
        env=daemon_env([*request.stack.env_vars, *filter(None, judge_keys)]),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
        limit=LINE_LIMIT,
    )
    memory = asyncio.create_task(_over_limit(process.pid, request.memory_gb))
    answer = asyncio.create_task(_answer(process, request, progress))
    alive = asyncio.create_task(_tell_time(request, progress))
    try:
        limit = SETUP_TIMEOUT_S + request.timeout_s * (2 if request.measure else 1)
        if request.policy is not None:
            limit += request.limits.timeout_s * (request.rows or UNCOUNTED_ROWS) * request.repeats
        await asyncio.wait([memory, answer], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            if (outcome := answer.result()) is not None:
                return outcome
            assert process.stderr is not None
            log = (await process.stderr.read()).decode(errors="replace")
            last = next((line for line in reversed(log.splitlines()) if line.strip()), "no message")
            diagnosis = Diagnosis("failed", f"the check itself failed: {last}", traceback=log[-4000:])
        elif memory.done():
            detail = f"memory: more than {request.memory_gb:g} GB"
            diagnosis = Diagnosis("blocked", detail, memory.result(), "memory")
        else:
            diagnosis = Diagnosis("failed", f"not done after {limit:g} s, installing included")
        if not (request.measure and request.replay):
            return _result(request, began, diagnosis)
    finally:
        memory.cancel()
        answer.cancel()
        alive.cancel()
        await asyncio.shield(_kill(process))
    # The verdict does not depend on what the measurements took.
    outcome = await check_in_process(request.model_copy(update={"measure": False, "policy": None}), progress)
    if isinstance(outcome, GymgateError):
        return outcome
    missing = {"all": f"it was ended while it was measured: {diagnosis.detail}"}
    return outcome.model_copy(update={"settings": request.settings, "missing": missing})


async def _tell_time(request: CheckRequest, progress: OnProgress) -> None:
    """Say now and then that the check goes on, and what ends it."""
    began, wait_s = time.monotonic(), ALIVE_S
    while True:
        await asyncio.sleep(wait_s)
        wait_s *= 2
        limits = f"{request.limits.timeout_s:g} s for a rollout, {request.timeout_s:g} s for all"
        seconds = time.monotonic() - began
        progress(request, f"still checking after {seconds:.0f} s; it gives up by itself: {limits}")


def request_to_wire(request: CheckRequest) -> bytes:
    """Return a request as JSON with keys and headers in the clear: for the pipe to the process of the check only."""
    value = request.model_dump(mode="json")
    value["policy"] = request.policy and reveal(request.policy.model_dump())
    value["stack"]["models"] = {
        name: endpoint if isinstance(endpoint, str) else reveal(endpoint.model_dump())
        for name, endpoint in request.stack.models
    }
    return codec.dumps(value)


async def _answer(
    process: Process, request: CheckRequest, progress: OnProgress
) -> CheckResult | GymgateError | None:
    """Hand over the request, pass on progress, return the outcome; `None` if the process ends without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(request_to_wire(request))
        process.stdin.close()
    async for line in process.stdout:
        event = codec.loads_own(line)
        if "progress" in event:
            progress(request, event["progress"])
        elif "error" in event:
            return from_wire(event["error"])
        else:
            return CheckResult.model_validate(event["check"])
    return None


def _result(request: CheckRequest, began: float, diagnosis: Diagnosis) -> CheckResult:
    """A result for an environment whose process gave none."""
    kind, name = request.kind_and_name
    return request.result(began, environment=name, kind=kind, **diagnosis._asdict())


async def _kill(process: Process) -> None:
    """End the worker and everything below it, its stack's daemon included."""
    with contextlib.ExitStack() as exits:
        held: dict[int, int] = {}
        for pid in descendants(process.pid) if process.returncode is None else ():
            with contextlib.suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
                exits.callback(os.close, held[pid])
        # One that ended before it was held is not below the worker any more: its number may be another process's.
        below = held.keys() & {*descendants(process.pid)}
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held[pid], signal.SIGKILL)
    await process.wait()


async def _over_limit(pid: int, memory_gb: float) -> str:
    """Return when a process and its descendants use more memory than that; with a message that names the amount."""
    while True:
        await asyncio.sleep(MEMORY_POLL_S)
        family = (pid, *await asyncio.to_thread(descendants, pid))
        used = await asyncio.to_thread(proportional_bytes, family) / 1e9
        if used > memory_gb:
            return f"its processes used {used:.1f} GB of memory; the limit is {memory_gb:g} GB (--memory)"
