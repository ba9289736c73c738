"""The request and the results of a check. Plain values that travel and are kept as JSON."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from gymgate.check.record.sections import Sections
from gymgate.config import Config, HTTPEndpoint, JudgeEndpoint, Routing, RuntimeConfig, Settings
from gymgate.rollout import RolloutStatus

Verdict = Literal["match", "differs", "blocked", "incomplete", "failed"]
"""match: every recorded reward came out again; differs: at least one did not; blocked: something that it needs is
missing here; incomplete: the release ships no agent, data or recording for it; failed: anything else."""
VERDICTS: tuple[Verdict, ...] = ("match", "differs", "blocked", "incomplete", "failed")
_WORST_FIRST: tuple[Verdict, ...] = ("failed", "differs", "blocked", "incomplete", "match")

NO_JUDGE = "judge: the record does not hold its answers; name an endpoint with --judge"
NOT_ASKED = "the agent was scored without asking the policy"
_NO_LONGER = "no longer exists"

JudgedBy = Literal["recorded", "endpoint", "stand-in"]
"""recorded: the judge's answers were in the record; endpoint: the user named one; stand-in: a fixed text, which only
shows that a reward comes back."""


class CheckRequest(Config):
    """One environment to check."""

    environment: str
    version: str
    """nemo-gym release."""
    interpreter: str | None = None
    """Interpreter of a nemo-gym that you installed yourself; `None`: a runtime that gymgate makes."""
    models: tuple[tuple[str, JudgeEndpoint], ...] = ()
    """Endpoints of judges and simulators, by instance name. The others give the answers that were recorded."""
    overrides: Settings = ()
    """Dotted keys and values for the environment's config."""
    sandbox: str | None = None
    """Sandbox provider, as in `EnvironmentConfig`."""
    routing: Routing | None = None
    """How keys reach model calls, as in `EnvironmentConfig`."""
    env_vars: tuple[str, ...] = ()
    """Names of environment variables that its servers may see."""
    start_timeout_s: float = 150.0
    """Seconds from the first process of the stack until every server listens, without installing."""
    row_timeout_s: float = 180.0
    """Seconds for one rollout."""
    timeout_s: float = 900.0
    """Seconds for the whole check, without installing."""
    memory_gb: float = 8.0
    """Memory of all its processes together (proportional set size) at which they are killed."""
    logs: str | None = None
    """Directory in which its servers' logs stay."""

    record: bool = False
    """Whether to measure what a quality record holds, within `timeout_s` more seconds."""
    policy: HTTPEndpoint | None = None
    """A real model to measure too."""
    policy_rows: int | None = None
    """Packaged rows that the model gets; `None`: all."""

    @property
    def runtime(self) -> RuntimeConfig:
        return RuntimeConfig(version=self.version, interpreter=self.interpreter)

    @property
    def settings(self) -> str:
        """Everything but the environment that a result depends on; a result with equal settings is not checked again."""
        optional = ("env_vars", "interpreter", "policy", "policy_rows", "record", "routing", "sandbox")
        unset = {name for name in optional if not getattr(self, name)}
        return self.model_dump_json(exclude={"environment", "logs", *unset})

    def result(self, began: float, **fields: Any) -> CheckResult:
        """A result of this request, begun at `began` (`time.monotonic()`)."""
        seconds = round(time.monotonic() - began, 1)
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        return CheckResult.model_validate(
            {"version": self.version, "settings": self.settings, "seconds": seconds, "date": date, **fields}
        )


class Diagnosis(NamedTuple):
    """A verdict on an environment or on one of its recordings."""

    verdict: Verdict
    detail: str = ""
    """For people: the need, the cause, what is lacking, or the error."""
    evidence: str = ""
    """The line of a log or an error that shows it."""
    log_tail: str = ""
    """For `failed`: the end of the servers' logs."""
    traceback: str = ""
    """For `failed`: the last exception of a server, with the frames of the environment's own code."""


class RowResult(Config):
    """One recorded rollout, replayed."""

    recording: str
    """File and line."""
    recorded: float | None = None
    """The reward in the record; `None` if it has none."""
    reward: float | None = None
    """The reward that came back; `None` if none did."""
    status: RolloutStatus | None = None
    verdict: Verdict
    error: str | None = None
    """Class and message of the failed rollout's error."""
    need: str | None = None
    """For `blocked`: kind and name of what is missing."""
    cause: str | None = None
    """Why the verdict is not `match`, where that is known."""
    packaged: bool = False
    """Whether a packaged row was run; otherwise the record itself was the row."""
    judged_by: JudgedBy | None = None
    """Who answered the calls to other model servers; `None` if there were none."""

    @property
    def outdated(self) -> bool:
        """Whether the release no longer has the recorded agent."""
        return (self.cause or "").endswith(_NO_LONGER)

    @property
    def rewarded(self) -> bool:
        """Whether it got a reward that counts: not one that was given because no judge could be asked."""
        return self.reward is not None and self.verdict != "blocked"

    def updated(self, **fields: Any) -> RowResult:
        return self.model_copy(update=fields)

    def concluded(self, diagnosis: Diagnosis, **fields: Any) -> RowResult:
        """The same with a diagnosis: a missing need with its evidence, or a cause."""
        blocked = diagnosis.verdict == "blocked"
        told = (
            {"need": diagnosis.detail, "cause": diagnosis.evidence or None}
            if blocked
            else {"cause": diagnosis.detail or None}
        )
        return self.updated(verdict=diagnosis.verdict, **told, **fields)


class CheckResult(Config):
    """The result of checking one environment."""

    environment: str
    kind: str
    """Directory of the release: resources_servers, environments, benchmarks; `config` for a user's own."""
    version: str
    verdict: Verdict
    detail: str = ""
    """For people: the need, the cause, what is lacking, or the error."""
    evidence: str = ""
    """The line of a log or an error that shows it."""
    config: str = ""
    """The environment's config that was started."""
    agents: tuple[str, ...] = ()
    """Implementations of its agents."""
    needs: tuple[str, ...] = ()
    """Kinds of needs read from its files before anything ran."""
    rows: tuple[RowResult, ...] = ()
    broken: tuple[str, ...] = ()
    """Recorded lines that could not be read, with the reason; they are skipped."""
    notes: tuple[str, ...] = ()
    rewarded: bool = False
    """Whether a packaged row or a recorded one got a reward without a stand-in for a judge."""
    rewarded_by_stand_in: bool = False
    """Whether one got a reward with a fixed text as the judge's answer."""
    seconds: float = 0.0
    date: str = ""
    log_tail: str = Field(default="", repr=False)
    """For `failed`: the end of the servers' logs."""
    traceback: str = Field(default="", repr=False)
    """For `failed`: the last exception of a server, with the frames of the environment's own code."""
    settings: str = Field(default="", repr=False)
    sections: Sections | None = Field(default=None, repr=False)
    """What was measured for the record; `None` if nothing was."""

    @property
    def matched(self) -> int:
        return sum(row.verdict == "match" for row in self.rows)

    @property
    def compared(self) -> int:
        """Recordings with a reward to compare with and an agent that still exists."""
        return sum(row.recorded is not None and not row.outdated for row in self.rows)


def no_agent(name: str) -> str:
    """The cause of a recording whose agent the release no longer has."""
    return f"its agent {name!r} {_NO_LONGER}"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The gravest of some verdicts; `incomplete` if there are none."""
    found = set(verdicts)
    return next((verdict for verdict in _WORST_FIRST if verdict in found), "incomplete")


def replayable(results: Sequence[RowResult]) -> list[RowResult]:
    """The results whose agent still exists; all of them if there is none."""
    return [row for row in results if not row.outdated] or list(results)


def same_reward(one: float, other: float) -> bool:
    """Equal but for rounding in the last digits of a printed number."""
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
