"""What a check is asked and what it says. Plain values that travel as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from gymgate.config import Config, JudgeEndpoint, Settings
from gymgate.rollout import RolloutStatus

Verdict = Literal["match", "differs", "blocked", "incomplete", "failed"]
"""match: every recorded reward came out again; differs: one did not; blocked: it needs what is not here;
incomplete: the release ships no agent, data or recording for it; failed: anything else."""
VERDICTS: tuple[Verdict, ...] = ("match", "differs", "blocked", "incomplete", "failed")
_WORST_FIRST: tuple[Verdict, ...] = ("failed", "differs", "blocked", "incomplete", "match")

NO_LONGER = "no longer exists"

JudgedBy = Literal["recorded", "endpoint", "stand-in"]
"""recorded: the judge's answers were in the record; endpoint: the user named one; stand-in: a fixed text, which only
shows that a reward comes back."""


class Job(Config):
    """One environment to check."""

    environment: str
    version: str
    """nemo-gym release."""
    models: tuple[tuple[str, JudgeEndpoint], ...] = ()
    """Endpoints of judges and simulators, by instance name; others get the judge's answers that were recorded."""
    overrides: Settings = ()
    """Dotted keys and values for the environment's config."""
    env_vars: tuple[str, ...] = ()
    """Names of environment variables that its servers may see."""
    start_timeout_s: float = 150.0
    """Seconds from the first process of the stack until every server listens; installing is not counted."""
    row_timeout_s: float = 180.0
    """Seconds that one rollout may take."""
    timeout_s: float = 900.0
    """Seconds for all of it, installing not counted."""
    memory_gb: float = 8.0
    """Proportional set size of all its processes together, at which they are killed."""

    @property
    def settings(self) -> str:
        """What a result depends on beside the environment: results of equal settings need no second check."""
        unset = set() if self.env_vars else {"env_vars"}
        return self.model_dump_json(exclude={"environment", *unset})


class RowCheck(Config):
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
    """Whether a packaged row is the one that was recorded; else the record itself was the row."""
    judged_by: JudgedBy | None = None
    """Who answered the calls to other model servers, if any were made."""

    @property
    def outdated(self) -> bool:
        """Whether its agent is not in the release any more."""
        return (self.cause or "").endswith(NO_LONGER)


class Check(Config):
    """What came of checking one environment."""

    environment: str
    kind: str
    """Directory of the release: resources_servers, environments, benchmarks; `config` for a user's own."""
    version: str
    verdict: Verdict
    detail: str = ""
    """For people: the need, the cause, what is lacking, or the error."""
    evidence: str = ""
    """What was seen at run time that says so: a line of a log or of an error."""
    config: str = ""
    """The environment's config that was started."""
    agents: tuple[str, ...] = ()
    """Implementations of its agents."""
    needs: tuple[str, ...] = ()
    """Kinds of needs read from its files before anything ran."""
    rows: tuple[RowCheck, ...] = ()
    broken: tuple[str, ...] = ()
    """Recorded lines that could not be read, with the reason; skipped."""
    notes: tuple[str, ...] = ()
    rewarded: bool = False
    """Whether a packaged row or a recorded one got a reward without a stand-in for a judge."""
    rewarded_by_stand_in: bool = False
    """Whether one got a reward with a fixed text as the judge's answer."""
    seconds: float = 0.0
    date: str = ""
    log_tail: str = Field(default="", repr=False)
    """For `failed`: the end of the servers' logs."""
    settings: str = Field(default="", repr=False)

    @property
    def matched(self) -> int:
        return sum(row.verdict == "match" for row in self.rows)

    @property
    def compared(self) -> int:
        """Recordings that have a reward to compare with, and an agent that still exists."""
        return sum(row.recorded is not None and not row.outdated for row in self.rows)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a whole: the gravest of its parts; `incomplete` without parts."""
    found = set(verdicts)
    return next((verdict for verdict in _WORST_FIRST if verdict in found), "incomplete")


def same_reward(one: float, other: float) -> bool:
    """Equal but for rounding in the last digits of a printed number."""
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
