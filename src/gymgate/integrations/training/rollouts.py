"""Rollouts of one trainer process: run them, count them, and stop a training in which all of them fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, DataError, ErrorKind, GymgateError, TokenDataError, from_wire
from gymgate.core.starting import SharedStart
from gymgate.rollouts import Rollout, RolloutError, Segment, outcome_of
from gymgate.rollouts.result import failed_rollout
from gymgate.stack import AgentInfo, Stack, connect
from gymgate.tokens import TokenConversation

logger = logging.getLogger(__name__)

KINDS: Final[tuple[str, ...]] = get_args(ErrorKind)
MAX_FAILED_BATCHES = 3
"""A training ends after this many batches in a row in which every rollout failed,"""
MIN_FAILED_GROUPS = 8
"""and at least this many groups: where a batch is one group, three unusable rows in a row are no rarity."""
PATIENCE_S = 300.0
"""Failures that a retry may cure end a training only after this time: a server needs minutes to restart."""
MAX_PAUSE_S = 30.0


@dataclass(frozen=True)
class SampledRollout:
    """A rollout with the token ids that the policy sampled in it."""

    rollout: Rollout
    segments: list[Segment]
    turns: int
    """Number of model calls."""
    prefix_misses: int
    """Model calls, after the first, whose prompt does not extend the exact ids of an earlier call."""
    first_prompt_ids: list[int]
    """The first prompt; it stands for a rollout in which nothing was sampled."""


@dataclass(eq=False)
class FailureGuard:
    """Logs failed rollouts, and ends a training in which every rollout fails. It must see the rollouts of all ranks."""

    batch_size: int | None = None
    """Rollouts in a batch; `None`: each call of `check` gets one batch."""
    clock: Callable[[], float] = time.monotonic
    _failed: int = 0
    _groups: int = 0
    _batches: float = 0.0
    _since: float | None = None
    _retryable: bool = False

    def check(self, results: Sequence[RolloutError | None], *, groups: int = 1) -> None:
        """Raise the most frequent error once every rollout of the last `MAX_FAILED_BATCHES` batches failed.

        `results` has the error of each rollout, `None` for one that did not fail; they belong to `groups` groups. The
        failures must be of `MIN_FAILED_GROUPS` groups, and if a retry may succeed (`retryable`), have gone on for
        `PATIENCE_S` seconds.
        """
        errors = count_errors(results)
        for (_, message), count in errors:
            logger.warning("rollouts failed: %d x %s", count, message)
        if not errors or None in results:
            self._reset()
            return
        self._failed += len(results)
        self._groups += groups
        self._batches += len(results) / (self.batch_size or len(results))
        self._since = self.clock() if self._since is None else self._since
        self._retryable = any(error is not None and error.retryable for error in results)
        elapsed_s = self.clock() - self._since
        if self._batches < MAX_FAILED_BATCHES or self._groups < MIN_FAILED_GROUPS:
            return
        if self._retryable and elapsed_s < PATIENCE_S:
            return
        (error, message), _ = errors[0]
        summary = (
            f"every rollout of {self._batches:.0f} batches failed ({self._failed} rollouts, {elapsed_s:.0f} s),"
            f" most often: {message}"
        )
        self._reset()
        raise from_wire({"error": error, "message": summary})

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next rollouts, so that they are not wasted on a server that restarts."""
        return min(MAX_PAUSE_S, 2.0 ** (self._batches - 1)) if self._retryable else 0.0

    def _reset(self) -> None:
        self._failed = 0
        self._groups = 0
        self._batches = 0.0
        self._since = None
        self._retryable = False


@dataclass(eq=False)
class RolloutRunner:
    """Runs rollouts on one stack, and connects again after the stack was lost. For one event loop."""

    config: StackConfig
    limits: RolloutLimits
    guard: FailureGuard = field(default_factory=FailureGuard)
    """Sees the results, which the caller gives it."""
    _has_started: bool = False
    _stack: SharedStart[Stack] = field(init=False)

    def __post_init__(self) -> None:
        self._stack = SharedStart(self._connect)

    async def start(self) -> Stack:
        """Connect to the stack, which starts unless it already runs. Raises the error of a failed start, and `ConfigError` for an
        environment server that plays the policy with several agents, unless its config says which one is trained.

        Concurrent callers share one start and its error. The next call after an error tries again.
        """
        stack = await self._stack.get()
        self._has_started = True
        return stack

    async def ready(self) -> None:
        """Wait until the next rollouts may begin: for the first start, whose error is raised, and for the guard's pause.

        Once the stack was up, a start that fails is a failed rollout.
        """
        if not self._has_started:
            await self.start()
        await asyncio.sleep(self.guard.pause_s)

    async def run(
        self, environment: str, row: Mapping[str, Any], conversation: TokenConversation
    ) -> SampledRollout:
        """Run one rollout. An unusable row, a lost stack and a failed reconnect give a failed rollout, no exception.

        Judges that are the policy get a separate conversation, which is not trained on.

        An empty `environment` means that of the agent which the row names. Once the stack is up, this returns within
        about a second of the rollout deadline.
        """
        try:
            stack = await self.start()
            environment = environment or environment_of(row, stack.agents)
            rollout = await self._run_on(stack, environment, row, conversation)
        except GymgateError as error:
            rollout = failed_rollout(error, id="not-run", environment=environment)
        conversation.leave_out(rollout.policy_calls)
        return SampledRollout(
            rollout,
            conversation.segments,
            conversation.call_count,
            conversation.prefix_misses,
            conversation.first_prompt_ids,
        )

    async def close(self) -> None:
        """Release the stack; cancel a start that is under way. Idempotent."""
        if (stack := await self._stack.stop()) is not None:
            await stack.close()

    async def _connect(self) -> Stack:
        try:
            stack = await connect(self.config, progress=lambda line: logger.info("%s", line), reconnect=True)
            try:
                stack.refuse_training()
            except ConfigError:
                await stack.close()
                raise
            return stack
        except GymgateError as error:
            logger.error("the stack did not start: %s", error)
            raise

    async def _run_on(
        self, stack: Stack, environment: str, row: Mapping[str, Any], conversation: TokenConversation
    ) -> Rollout:
        try:
            return await stack.run(
                row,
                policy=conversation,
                judge_policy=conversation.policy.judge_conversation(),
                environment=environment,
                limits=self.limits,
            )
        except ConfigError as error:  # the row names something that this stack does not have
            raise DataError(error.message) from error


def environment_of(row: Mapping[str, Any], agents: Mapping[str, AgentInfo]) -> str:
    """Return the environment of the agent that the row names. A row that names none belongs to the only environment.

    Raises `DataError` if the stack has no such agent, or if there are several environments to choose from.
    """
    name = (row.get("agent_ref") or {}).get("name")
    if isinstance(name, str) and name in agents:
        return agents[name].environment
    environments = sorted({agent.environment for agent in agents.values()})
    if name is None and len(environments) == 1:
        return environments[0]
    names = ", ".join(sorted(agents))
    raise DataError(f"the row's agent_ref is {name!r}, not an agent of the stack: {names}")


def filled_logprobs(segment: Segment) -> list[float] | None:
    """Return one logprob per id, 0.0 for ids that were not sampled, which no loss reads; `None` if the engine gave none.

    Raises `TokenDataError` for a segment in which only some sampled ids have one.
    """
    if segment.logprobs is None:
        return None
    pairs = list(zip(segment.mask, segment.logprobs, strict=True))
    if any(on and value is None for on, value in pairs):
        raise TokenDataError("the engine gave logprobs for some sampled ids of a rollout and not for others")
    return [0.0 if value is None else value for _, value in pairs]


def filler_segment(filler_id: int, prompt_ids: Sequence[int] = ()) -> Segment:
    """Return a segment with one masked id, for a trainer that needs one where nothing was sampled."""
    return Segment(prompt_ids=list(prompt_ids) or [filler_id], completion_ids=[filler_id], mask=[0])


def masked(segment: Segment) -> Segment:
    """Return the segment with nothing to train on."""
    return segment.model_copy(update={"mask": [0] * len(segment.mask)})


def rollout_metrics(sampled: SampledRollout, delivered: Segment | None = None) -> dict[str, float]:
    """Return the numbers that trainers log for one rollout.

    `delivered` is the only segment that is trained on, for a trainer that takes one. A number that does not exist is
    left out: `reward` and its parts (`reward/NAME`) of a rollout that does not count, `delivered_fraction` of one that is
    not trained on.
    """
    rollout, outcome = sampled.rollout, outcome_of(sampled.rollout)
    kind = None if rollout.error is None else rollout.error.kind
    values = {
        "turns": float(sampled.turns),
        "segments": float(len(sampled.segments)),
        "prefix_misses": float(sampled.prefix_misses),
        "truncated": float(rollout.status == "truncated"),
        "unscored": float(outcome.reason == "unscored"),
        "masked": float(outcome.reason == "masked"),
        "failed": float(outcome.reason == "failed"),
        **{f"failed_{name}": float(kind == name) for name in KINDS},
        "latency_s": rollout.timing.total_s,
    }
    sampled_ids = sum(sum(segment.mask) for segment in sampled.segments)
    if delivered is not None and sampled_ids and outcome.trained:
        values["delivered_fraction"] = sum(delivered.mask) / sampled_ids
    if outcome.reward is not None:
        values["reward"] = outcome.reward
        values |= {f"reward/{name}": part for name, part in rollout.reward_parts.items()}
    return values


def values_by_metric(
    metrics: Sequence[Mapping[str, float]], environments: Sequence[str]
) -> dict[str, list[float]]:
    """Gather metrics of rollouts: `NAME` over all rollouts that have it, `ENVIRONMENT/NAME` over those of one environment."""
    gathered: dict[str, list[float]] = {}
    for values, environment in zip(metrics, environments, strict=True):
        for name, value in values.items():
            gathered.setdefault(name, []).append(value)
            if environment:
                gathered.setdefault(f"{environment}/{name}", []).append(value)
    return gathered


def mean_metrics(metrics: Sequence[Mapping[str, float]], environments: Sequence[str]) -> dict[str, float]:
    """Return the mean of each metric, named as in `values_by_metric`."""
    gathered = values_by_metric(metrics, environments)
    return {name: sum(values) / len(values) for name, values in gathered.items()}


def count_errors(results: Sequence[RolloutError | None]) -> list[tuple[tuple[str, str], int]]:
    """Return each distinct error (class name, message) with its count, the most frequent first."""
    errors = [error for error in results if error is not None]
    return Counter((error.type, f"{error.kind}: {error.message}") for error in errors).most_common()
