"""The rollout record, from which each SDK's emitter takes what that SDK wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gymgate.core.config import POLICY, Dialect
from gymgate.core.errors import ErrorKind, GymgateError, from_wire
from gymgate.rollouts.history import read_requests
from gymgate.rollouts.notebook import conversation_html
from gymgate.rollouts.outcome import outcome_of
from gymgate.rollouts.transcript import transcript

RolloutStatus = Literal["completed", "truncated", "masked", "failed"]
"""completed: it came to its end; truncated: a limit ended it; masked: Gym says that its reward measures nothing;
failed: no result. `gymgate.outcome_of` says what each counts for."""


class Record(BaseModel):
    """Base of the record's parts."""

    model_config = ConfigDict(extra="forbid")


class Usage(Record):
    """Token counts of one call; `None` where the endpoint did not say."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


Limit = Literal["max_calls", "context_length"]

UNDELIVERED = "undelivered"
"""The entry of a call's `details` that says that its agent gave up on it."""


class ModelCall(Record):
    """One request to a model, and its answer.

    Requests of a rollout share what they have in common: change a copy.
    """

    index: int
    """Position among the rollout's calls, judges' included, by arrival."""
    model_server: str = POLICY
    """Gym instance the call was made to; any other than the policy's is a judge or a simulator."""
    agent: str | None = None
    """The agent that made it, where an environment server ran the rollout and only this agent calls that model server."""
    dialect: Dialect
    """API that the agent spoke."""
    request: dict[str, Any] | None = None
    """Body as the agent sent it, gymgate's routing entries removed; `None` if bodies are not kept."""
    response: dict[str, Any] | None = None
    """Body as the agent received it."""
    upstream_request: dict[str, Any] | None = None
    """Body sent to the endpoint, where it differs by translation."""
    upstream_response: dict[str, Any] | None = None
    """Body the endpoint gave, where it differs by translation."""
    status_code: int | None = None
    """HTTP status the agent got."""
    error: str | None = None
    usage: Usage = Field(default_factory=Usage)
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    details: dict[str, Any] = Field(default_factory=dict)
    """What the endpoint's side adds to the answer: `replica` and `retries` of an HTTP endpoint; `recording`, `index`,
    `turn` of so many `turns`, and `match` of a replay: `exact`, or `loose` where only the policy said what was recorded, and
    the environment something else or more; `undelivered`, the id of an answer that came after its agent had
    closed the connection and did not ask again; `overflow`, what the endpoint said of a prompt that exceeds its context, where
    the agent got an empty message instead (`RolloutLimits.context_overflow`)."""
    started_s: float = 0.0
    """Seconds after the rollout's start."""
    duration_s: float = 0.0
    finish_reason: str | None = None


def read_calls(value: Mapping[str, Any]) -> list[ModelCall]:
    """Return the calls of a parsed record, whose requests are entries of a `RequestLog`. They are not validated again."""
    requests = read_requests(value["requests"])
    calls = []
    for fields in value["calls"]:
        for name in ("request", "upstream_request"):
            if fields[name] is not None:
                fields[name] = requests[fields[name]]
        calls.append(
            ModelCall.model_construct(**{**fields, "usage": Usage.model_construct(**fields["usage"])})
        )
    return calls


class Segment(Record):
    """One trainable token sequence; lengths of `completion_ids`, `mask` and `logprobs` are equal."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """1 where the policy sampled the id, else 0."""
    logprobs: list[float | None] | None = None
    """One for each id, `None` where it was not sampled; the field is `None` if the engine gave no logprobs."""
    policy_version: tuple[int, int] | None = None
    """Lowest and highest policy version that sampled it."""


class RolloutError(Record):
    """Why a rollout failed."""

    kind: ErrorKind
    message: str
    type: str
    """Name of the class in `gymgate.core.errors`."""
    server: str | None = None
    status_code: int | None = None
    retryable: bool = False
    terminal: bool = False
    """Whether the environment says that another attempt would fail too; none is made then."""
    reward_given: float | None = None
    """For a failed judge: the reward that the environment gave all the same. It does not count."""
    judge: bool = False
    """Whether a judge, or another model server than the policy's, failed."""

    def __str__(self) -> str:
        """Return `TYPE: MESSAGE` on one line."""
        return " ".join(f"{self.type}: {self.message}".split())

    def to_exception(self) -> GymgateError:
        """Return the error that ended the rollout, to be raised."""
        return from_wire({**self.model_dump(), "error": self.type})


class Timing(Record):
    """Seconds."""

    total_s: float = 0.0
    model_s: float = 0.0
    """Sum over policy calls; more than `total_s` where calls overlap."""
    judge_s: float = 0.0


class Rollout(Record):
    """One run of one row."""

    id: str
    """Public id; safe to log and store."""
    environment: str
    agent: str
    status: RolloutStatus
    limit: Limit | None = None
    """The limit that ended it early: `max_calls` of `RolloutLimits`, or the policy's context length, as its endpoint said."""
    reward: float | None = None
    """As Gym gave it; `None` where there is none, never 0."""
    reward_parts: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    """Every other finite number at the top level of Gym's result that the row did not have already."""
    error: RolloutError | None = None
    answer_found: bool | None = None
    """Whether the grader found an answer in what the policy said; `None` where its result does not say."""
    result: dict[str, Any] | None = None
    """The agent's answer to `/run`, routing entries removed."""
    calls: list[ModelCall] = Field(default_factory=list)
    timing: Timing = Field(default_factory=Timing)

    @property
    def policy_calls(self) -> list[ModelCall]:
        """The calls made to the policy, in order of arrival."""
        return [call for call in self.calls if call.model_server == POLICY]

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        heading = {"environment": self.environment, "agent": self.agent, **self._figures()}
        error = None if self.error is None else f"{self.error.type}: {self.error.message}"
        return conversation_html(heading, error, transcript(self.result))

    def __str__(self) -> str:
        """Return it in a line; its `repr` has every byte of the result."""
        figures = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        error = "" if self.error is None else f", {self.error.type}: {self.error.message[:200]}"
        error = " ".join(error.split())
        return f"<{type(self).__name__} {self.environment[:100]}: {figures}{error}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the line that IPython shows of it in a list."""
        printer.text(str(self))

    def _figures(self) -> dict[str, str]:
        reward = outcome_of(self).reward
        limit = "" if self.limit is None else f" ({self.limit})"
        return {
            "status": f"{self.status}{limit}",
            "reward": "none" if reward is None else f"{reward:.4g}",
            "calls": str(len(self.policy_calls)),
            "seconds": f"{self.timing.total_s:.1f}",
        }


def has_policy_call(calls: Iterable[ModelCall]) -> bool:
    """Whether one of the calls went to the policy, not to a judge."""
    return any(call.model_server == POLICY for call in calls)
