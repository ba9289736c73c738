"""One row to one agent, with a deadline: from an open route to the fields of a `Rollout`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from gymgate.config import POLICY
from gymgate.errors import GymgateError, PolicyError, RolloutTimeoutError, StackLostError
from gymgate.gateway import Route
from gymgate.gateway.call import Call
from gymgate.rollout import result as results

_JSON = {"Content-Type": "application/json"}
# Below the 5 s after which NeMo Gym 0.4's servers close an idle connection, perhaps under a request.
_KEEPALIVE_S = 2.0
# Within this time a server's death, if that was it, is known and this rollout is ended for it.
_DEATH_SHOWS_S = 0.5


@dataclass
class Job:
    """What to post for whom."""

    environment: str
    agent: str
    agent_type: str
    body: bytes
    """The row with its routing, as JSON."""
    rollout_id: str
    timeout_s: float
    waits_for: str = "its turn"
    """What the rollout waits for now, for the error if its time runs out."""

    def timed_out(self) -> dict[str, Any]:
        """The outcome of a rollout whose deadline has passed."""
        message = f"Timed out after {self.timeout_s:g} s waiting for {self.waits_for} (environment {self.environment!r})"
        return results.failed(RolloutTimeoutError(message))


@dataclass
class JobResult:
    """What came of a job: fields of a `Rollout`, and the agent's answer as JSON, if there is one."""

    fields: dict[str, Any]
    result: bytes | None = None


def new_session() -> aiohttp.ClientSession:
    """For posting rows: no cookies kept, since a session cookie is one rollout's; no timeout but the job's."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def run_job(session: aiohttp.ClientSession, job: Job, route: Route, url: str) -> JobResult:
    """Post the job to the agent at `url`. A failure comes back as data.

    Cancelling it, as the caller's deadline does, closes the connection, at which the agent stops (nemo-gym 0.7); its late
    model calls are refused once the caller closes the route.
    """
    job.waits_for = f"agent {job.agent!r}"
    try:
        status, body = await _post(session, job, url)
    except aiohttp.ClientError as error:
        await asyncio.sleep(_DEATH_SHOWS_S)
        message = f"agent {job.agent!r} broke the connection: {type(error).__name__}: {error}"
        return JobResult(results.failed(StackLostError(message)))
    if route.judges.failure is not None:
        return JobResult(results.failed(route.judges.failure))
    if status != 200 and route.truncated is not None:
        # The agent could not go on without the call that was refused.
        return JobResult({"status": "truncated", "limit": route.truncated})
    if status != 200:
        if route.failure is None:  # a server that died may be what the agent stumbled over
            await asyncio.sleep(_DEATH_SHOWS_S)
        return JobResult(results.failed(_blame(status, body, job, route)))
    read = results.read_result(body, key=route.key, rollout_id=job.rollout_id)
    if read is None:
        text = results.condensed(body)
        return JobResult(
            results.failed(StackLostError(f"agent {job.agent!r} answered with no JSON object: {text}"))
        )
    result, clean = read
    if (failure := _decisive_failure(result, route)) is not None:
        return JobResult(results.failed(failure))
    fields = results.settled(
        result, job.body, agent=job.agent, agent_type=job.agent_type, limit=route.truncated
    )
    return JobResult(fields, None if "error" in fields else clean)


async def _post(session: aiohttp.ClientSession, job: Job, url: str) -> tuple[int, bytes]:
    async with session.post(url, data=job.body, headers=_JSON, allow_redirects=False) as response:
        return response.status, await response.read()


def _decisive_failure(result: Mapping[str, Any], route: Route) -> PolicyError | None:
    """The failure of an endpoint that an agent, or Gym where it says that a judge failed, made a score of.

    Some agents end the conversation at a failed call and are scored for what they had, and Gym gives a masked 0
    where a judge fails. Neither says anything of the policy.
    """
    if results.judge_failed(result):
        reason = result.get("failure_reason") or result.get("_ng_failure_judge_error") or "it gives no reason"
        return PolicyError(f"the environment says that its judge failed: {reason}", retryable=True)
    if route.failure is None or route.truncated is not None:
        return None
    last = next((call for call in reversed(route.log) if call.model_server == POLICY), None)
    return route.failure if last is not None and last.error is not None else None


def _blame(status: int, body: bytes, job: Job, route: Route) -> GymgateError:
    """Whose fault an agent's error is: the policy's, if a model call of this rollout failed."""
    if route.failure is not None:
        return route.failure
    clean = body.replace(route.key.encode(), job.rollout_id.encode())
    return results.refused(status, clean, job.agent)


def finished(job: Job, outcome: JobResult, calls: Sequence[Call], started: float) -> dict[str, Any]:
    """The rollout's fields beside its bodies, ready to be serialised; `started` as of `time.monotonic`."""
    return {
        "id": job.rollout_id,
        "environment": job.environment,
        "agent": job.agent,
        **outcome.fields,
        "timing": {
            "total_s": time.monotonic() - started,
            "model_s": sum(call.duration_s for call in calls if call.model_server == POLICY),
            "judge_s": sum(call.duration_s for call in calls if call.model_server != POLICY),
        },
    }
