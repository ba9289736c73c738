"""One rollout in the daemon: wait for its servers, post its row to its agent or environment server, decide what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gymgate.core import codec
from gymgate.core.config import POLICY
from gymgate.core.errors import (
    EnvironmentServerError,
    GymgateError,
    PolicyError,
    RolloutTimeoutError,
    StackLostError,
    described,
)
from gymgate.core.http_client import LOOPBACK, MAX_BODY, HTTPClient, HTTPFailure, Request
from gymgate.gateway.handler import DROPPED_KEY
from gymgate.gateway.requests import METADATA_KEY
from gymgate.gateway.route import Route
from gymgate.rollouts import result as results
from gymgate.rollouts.episodes import (
    EpisodeFailure,
    failed_episode_fields,
    partial_fields,
    read_episode,
)
from gymgate.rollouts.no_answer import answer_found
from gymgate.rollouts.record import Limit, has_policy_call
from gymgate.stack.daemon.agent_processes import AgentProcess
from gymgate.stack.daemon.running_environment import RunningEnvironment, ServerSet
from gymgate.stack.protocol import Reply

if TYPE_CHECKING:
    from gymgate.stack.daemon.running_stack import RunningStack

# Below the 5 s after which NeMo Gym 0.4's servers close an idle connection, perhaps under a request.
_KEEPALIVE_S = 2.0
_MAX_RESULT = results.LONGER * MAX_BODY
# Within this time a server's death is noticed, and ends its rollouts with the better reason.
_DEATH_SHOWS_S = 0.5
_POLL_S = 0.01
UNHEARD_AT_ONCE, UNHEARD_S = 500, 30.0
"""Rows of a stack that may be posted before their first model call came, and how long each counts. A busy server accepts no
connection for seconds, and meanwhile the kernel keeps 2,048 for it (uvicorn's backlog) and drops or resets all further ones."""

logger = logging.getLogger(__name__)


def new_client() -> HTTPClient:
    """Return a client for posting rows."""
    return HTTPClient(keepalive_s=_KEEPALIVE_S, max_body=_MAX_RESULT)


_request = functools.lru_cache(maxsize=1024)(Request)


@dataclass
class RolloutRun:
    """A rollout under way. `fields` and `result` are set when `run` returns."""

    environment: RunningEnvironment
    agent: str
    body: bytes
    """The row with its routing, as JSON."""
    route: Route
    timeout_s: float
    started: float = field(default_factory=time.monotonic)
    owner: str | None = None
    """The environment server that it is posted to, which owns its episode."""
    row: bytes = b"{}"
    """The row without its routing, as JSON."""
    waits_for: str = "its turn"
    """Stands in the error if the time runs out."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the `Rollout`: its status with its result, its limit or its error."""
    ends_at: float = math.inf
    """When its time is over, by the loop's clock."""
    keys_dropped: bool = False
    """Whether policy calls without a key were refused meanwhile."""

    def __post_init__(self) -> None:
        self.kind = "agent" if self.owner is None else "environment server"
        self.server = self.owner or self.agent
        """What its row is posted to, of this kind."""
        self.label = f"{self.kind} {self.server!r}"

    async def run(self, stack: RunningStack) -> None:
        """Run it within its time. A failure of whatever kind becomes this rollout's error."""
        own_process = self.agent in self.environment.agent_processes
        keyless_before = stack.gateway.keyless_policy_calls
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                self.ends_at = deadline.when() or self.ends_at
                await (self._in_process(stack) if own_process else self._on_servers(stack))
        except GymgateError as error:
            self._fail(error)
        except Exception as error:
            if deadline.expired() and isinstance(error, TimeoutError):
                busy = self.route.rate_limit
                reason = f"the rate limit of its endpoint: {busy.message}" if busy else self._awaited()
                waited = f"waiting for {reason} (environment {self.environment.name!r})"
                answered = None if busy else self._answered_calls()
                self._fail(
                    RolloutTimeoutError(f"Timed out after {self.timeout_s:g} s{answered or f' {waited}'}")
                )
            else:
                logger.exception("rollout %s failed", self.route.rollout_id)
                self._fail(StackLostError(f"internal error in the stack's daemon: {described(error)}"))
        self.keys_dropped = stack.gateway.keyless_policy_calls > keyless_before

    async def post(self, client: HTTPClient, url: str) -> None:
        """Post the row to the agent or environment server at `url`, and set what came of it.

        Cancelling it closes the connection, at which that server stops (nemo-gym 0.7). Late model calls of its agents are
        refused once the route is closed.
        """
        self.waits_for = self.label
        try:
            status, _, body = await client.send(_request(url), self.body)
        except HTTPFailure as error:
            await asyncio.sleep(_DEATH_SHOWS_S)
            message = f"{self.label} broke the connection: {error}"
            self._fail(StackLostError(message))
            return
        await self._hear_of_judges()
        if self.route.judges.failure is not None:
            self._fail(self.route.judges.failure, judge=True)
            self.fields["error"]["reward_given"] = self._reward_given(body) if status == 200 else None
        elif status == 200:
            self._read(body)
        elif self.route.truncated is not None:  # the agent could not go on without the call that was refused
            self.fields = {"status": "truncated", "limit": self.route.truncated}
        else:
            if self.route.failure is None:
                await asyncio.sleep(_DEATH_SHOWS_S)  # the agent's error may come from a server that died
            clean = body.replace(self.route.key.encode(), self.route.rollout_id.encode())
            self._fail(self.route.failure or results.run_error(status, clean, self.server, self.kind))

    async def _hear_of_judges(self) -> None:
        """Wait a moment for the end of judges' calls: that a server waits no longer may be heard after what it answered."""
        loop, judges = asyncio.get_running_loop(), self.route.judges
        for _ in range(round(_DEATH_SHOWS_S / _POLL_S)):
            if not judges.under_way or judges.failure is not None or loop.time() > self.ends_at - 2 * _POLL_S:
                return
            await asyncio.sleep(_POLL_S)

    def packed(self) -> Reply:
        """Return the record, for the SDK process."""
        calls = [call.record for call in self.route.log]
        error = self.environment.never_asked_error(self.agent, self.fields, calls)
        if error is not None:
            self._fail(error)
        failure = self.fields.get("error")
        if failure and self.keys_dropped and not has_policy_call(calls):
            # First: what follows quotes the agent, and summaries cut it.
            failure["message"] = (
                f"policy calls without a key were refused; {DROPPED_KEY}: {failure['message']}"
            )
        return Reply(None, codec.dumps({**self.record_fields(), **self.route.plain_calls()}))

    def record_fields(self) -> dict[str, Any]:
        """Return the record's fields beside its bodies, as JSON values."""
        calls = [call.record for call in self.route.log]
        return {
            "id": self.route.rollout_id,
            "environment": self.environment.name,
            "agent": self.agent,
            **self.fields,
            "timing": {
                "total_s": time.monotonic() - self.started,
                "model_s": sum(call.duration_s for call in calls if call.model_server == POLICY),
                "judge_s": sum(call.duration_s for call in calls if call.model_server != POLICY),
            },
        }

    def _fail(self, error: GymgateError, *, judge: bool = False) -> None:
        self.fields = results.error_fields(error, judge=judge)

    def _awaited(self) -> str:
        """Return what it waits for: the answer to a model call, if one is under way."""
        open_calls = (call.record for call in self.route.log if call.record.status_code is None)
        if (record := next(open_calls, None)) is None:
            return self.waits_for
        return "the policy" if record.model_server == POLICY else f"model server {record.model_server!r}"

    def _answered_calls(self) -> str | None:
        """Say that the policy answered all its calls, so that the time went elsewhere; `None` if a model call is under way."""
        seconds = [call.record.duration_s for call in self.route.log if call.record.model_server == POLICY]
        if not seconds or any(call.record.status_code is None for call in self.route.log):
            return None
        calls = "1 call" if len(seconds) == 1 else f"{len(seconds)} calls"
        return (
            f": the policy answered its {calls} in {sum(seconds):.1f} s; tools or scoring of "
            f"{self.environment.name!r} did not end"
        )

    async def _in_process(self, stack: RunningStack) -> None:
        """Run it in a process of its own once one is free, unless that or a server that it needs dies."""
        if self.environment.state == "down":
            await self.environment.server_set()  # raises the reason
        self.waits_for = f"a free process of agent {self.agent!r}; raise --agent-processes (agent_processes) or the timeout"
        async with self.environment.agent_processes[self.agent].lease(self.route) as process:
            await self._while_alive(process, self._on_servers(stack, process.port))

    async def _on_servers(self, stack: RunningStack, port: int | None = None) -> None:
        """Run it on the environment's servers, unless one dies; `port` is the agent's, if it has a process of its own."""
        self.waits_for = (
            "other rollouts to end: the open-file limit allows no more at once; raise `ulimit -n`"
        )
        async with stack.file_limit:
            self.waits_for = "the environment's servers"
            servers = await self.environment.server_set()
            agent_port = contextlib.nullcontext(port) if port else self.environment.server_port(self.server)
            judges = stack.gateway.keyless.judges.shared_with(self.route.judges, self.environment.judges)
            with judges, agent_port as number:
                url = f"http://{LOOPBACK}:{number}/run"
                await self._while_alive(servers, self.post_in_turn(stack, url))

    async def post_in_turn(self, stack: RunningStack, url: str) -> None:
        """Post the row once its server has accepted most of those before it."""
        self.waits_for = f"rows that were posted before to reach {self.label}"
        await stack.unheard.acquire()
        places = [stack.unheard]

        def give_back() -> None:
            if places:
                places.pop().release()

        timer = asyncio.get_running_loop().call_later(UNHEARD_S, give_back)
        self.route.on_first_call = give_back
        try:
            await self.post(stack.client, url)
        finally:
            timer.cancel()
            give_back()

    async def _while_alive(self, servers: ServerSet | AgentProcess, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, unless one of these servers dies meanwhile: then the rollout fails with the reason."""
        task = asyncio.current_task()
        assert task is not None
        servers.rollouts.add(task)
        try:
            await work
        except asyncio.CancelledError:
            if servers.error is None or task.uncancel() > 0:
                raise
            self._fail(servers.error)
        finally:
            servers.rollouts.discard(task)
            unanswered = self.fields.get("result") is None or self.fields["status"] == "failed"
            if isinstance(servers, ServerSet) and unanswered:
                self.environment.remove_containers(servers, self.route.key)

    def _read(self, body: bytes) -> None:
        """Set what an answer with status 200 comes to."""
        try:
            answer = self._answer(body)
        except ValueError as error:
            self._fail(EnvironmentServerError(f"{self.label}: {error}", server=self.server))
            return
        if answer is None:
            text = results.error_line(body)
            self._fail(StackLostError(f"{self.label} did not return a JSON object: {text}"))
        elif isinstance(answer, EpisodeFailure):
            self._read_failure(answer)
        elif (failure := self._decisive_failure(answer)) is not None:
            self._fail(failure, judge=results.judge_failed(answer))
        else:
            self.fields = self._interpreted(answer, self.route.truncated)
            if "error" not in self.fields:
                self.fields |= results.measurement_fields(answer, self.row, METADATA_KEY)
                grader = self.environment.plan.packaged_graders.get(self.server)
                self.fields["answer_found"] = answer_found(grader, answer)

    def _answer(self, body: bytes) -> dict[str, Any] | EpisodeFailure | None:
        """Return the agent's result, or the failure that its environment server reports; `None` for what is no JSON object.

        Raises `ValueError` for an answer of too many values, and for an environment server's that contradicts itself.
        """
        read = results.read_result(body, key=self.route.key, rollout_id=self.route.rollout_id)
        return read if read is None or self.owner is None else read_episode(read, self.route.rollout_id)

    def _read_failure(self, failure: EpisodeFailure) -> None:
        """Set what comes of an episode that its environment server reports as failed.

        Where its agent failed because a policy call did, that call's error says why.
        """
        assert self.owner is not None
        is_agents = failure.stage == "agent"
        if is_agents and self.route.truncated is not None:
            self.fields = {"status": "truncated", "limit": self.route.truncated}
            return
        error = self.route.failure if is_agents else None
        if error is None:
            self.fields = failed_episode_fields(failure, self.owner)
        else:
            self._fail(error)
            self.fields |= partial_fields(failure)

    def _interpreted(self, result: Mapping[str, Any], limit: Limit | None) -> dict[str, Any]:
        agent_type = self.environment.agents.get(self.agent)
        return results.interpret_result(
            result, self.row, agent=self.agent, agent_type=agent_type, limit=limit
        )

    def _reward_given(self, body: bytes) -> float | None:
        """Return the reward of an agent's answer that does not count, unless the environment says so itself."""
        try:
            answer = self._answer(body)
        except ValueError:
            return None
        if answer is None or isinstance(answer, EpisodeFailure) or results.judge_failed(answer):
            return None
        fields = self._interpreted(answer, None)
        return fields.get("reward") if fields["status"] in ("completed", "truncated") else None

    def _decisive_failure(self, result: Mapping[str, Any]) -> GymgateError | None:
        """Return the failure of an endpoint that got a score all the same.

        Some agents end the conversation at a failed call and are scored for what they had, and Gym gives a masked 0
        where a judge fails. Neither score says anything about the policy.
        """
        if results.judge_failed(result):
            reason = (
                result.get("failure_reason") or result.get("_ng_failure_judge_error") or "it gives no reason"
            )
            return PolicyError(
                f"the environment says that its judge failed: {results.one_line(reason)}", retryable=True
            )
        if self.route.failure is None or self.route.truncated is not None:
            return None
        last = next((call for call in reversed(self.route.log) if call.record.model_server == POLICY), None)
        return self.route.failure if last is not None and last.record.error is not None else None
