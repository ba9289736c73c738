"""The request and the result of a check. The result is also the record on disk, whose JSON schema is in the docs."""

from __future__ import annotations

import datetime
import math
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

import gymgate
from gymgate.core import codec
from gymgate.core.config import Config, HTTPEndpoint, JudgeEndpoint, Routing, RuntimeConfig, Settings
from gymgate.core.errors import ErrorKind
from gymgate.quality.record.schema import (
    NOT_HERE,
    Cost,
    Data,
    Deterministic,
    Failures,
    Oracle,
    PolicyRewards,
    Shape,
    Trivial,
)
from gymgate.rollouts import RolloutStatus

Verdict = Literal["match", "differs", "blocked", "incomplete", "failed"]
"""match: every recorded reward is reproduced; differs: at least one is not; blocked: something that it needs is
missing here; incomplete: the release ships no agent, data or recording for it; failed: anything else."""
_WORST_FIRST: tuple[Verdict, ...] = ("failed", "differs", "blocked", "incomplete", "match")

NO_JUDGE = "judge: the record does not hold its answers; give its endpoint with `--judge`"
NOT_ASKED = "the agent was scored without asking the policy"

_OUTSIDE = ("download", "git", "docker", "binary", "gpu", "search", "service")
"""Needs that are a download or a container."""

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
    config: str | tuple[str, ...] | None = None
    """Config of the environment, as in `EnvironmentConfig`; `None`: the one with the recorded agents."""
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

    measure: bool = False
    """Whether to measure its quality, within `timeout_s` more seconds."""
    policy: HTTPEndpoint | None = None
    """A real model to measure too."""
    policy_rows: int | None = None
    """Packaged rows that the model gets; `None`: all."""
    policy_repeats: int = 1
    """Rollouts of each of them."""
    sections: tuple[str, ...] = ()
    """Sections of the record to measure; empty: all."""
    replay: bool = True
    """Whether to replay the recordings; without it there is no verdict."""

    @property
    def runtime(self) -> RuntimeConfig:
        return RuntimeConfig(version=self.version, interpreter=self.interpreter)

    @property
    def settings(self) -> str:
        """Everything but the environment that a result depends on; a result with equal settings is not checked again."""
        return self.model_dump_json(exclude={"environment", "logs", "replay"})

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `gymgate check` that change what is run. Endpoints and files of this machine go by their names."""
        return tuple(self._options())

    def _options(self) -> Iterator[str]:
        names = (self.config,) if isinstance(self.config, str) else self.config or ()
        yield from (f"--config {Path(name).name}" for name in names)
        if self.sandbox:
            yield f"--sandbox {Path(self.sandbox).name}"
        for key, value in self.overrides:
            text = value if isinstance(value, str) else codec.dumps(value).decode()
            yield "--set " + shlex.quote(f"{key}={text}")
        for name, endpoint in self.models:
            yield f"--judge {name}={endpoint if isinstance(endpoint, str) else 'URL'}"
        for name in self.env_vars:
            yield f"--env-var {name}"

    def result(self, began: float, **fields: Any) -> CheckResult:
        """A finished result of this request, begun at `began` (`time.monotonic()`)."""
        return self.finish(self.new_result(**fields), began)

    def new_result(self, **fields: Any) -> CheckResult:
        """A result of this request, which `finish` completes."""
        about = {
            "nemo_gym": self.version,
            "gymgate": gymgate.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "options": self.options,
            "settings": self.settings,
        }
        return CheckResult.model_validate({**about, **fields})

    def finish(self, result: CheckResult, began: float) -> CheckResult:
        """The result with its duration and, if nothing was measured that should have been, with the reason."""
        changes: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        if self.measure and not result.machine:
            reason = result.detail or result.verdict
            changes["missing"] = result.missing or {"all": f"nothing could be run: {reason}"}
            changes["oracle"] = result.oracle or _untried(result.need, reason)
        return result.model_copy(update=changes)


def _untried(need: str, reason: str) -> Oracle:
    """The section of an environment that could not be run."""
    if need in _OUTSIDE:
        return Oracle(reason=NOT_HERE)
    return Oracle(reason="needs a judge") if need == "judge" else Oracle(reason="other", detail=reason)


class Diagnosis(NamedTuple):
    """A verdict on an environment or on one of its recordings."""

    verdict: Verdict
    detail: str = ""
    """The need, the cause, what is lacking, or the error."""
    evidence: str = ""
    """The line of a log or an error that shows it."""
    need: str = ""
    """For `blocked`: the kind of what is missing."""
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
    cause: str = ""
    """Why the verdict is not `match`, where that is known."""
    evidence: str = ""
    """The line of a log that shows it."""
    need: str = ""
    """For `blocked`: the kind of what is missing."""
    error: str = ""
    """Class and message of the failed rollout's error."""
    error_kind: ErrorKind | None = None
    outdated: bool = False
    """Whether the release no longer has the recorded agent."""
    packaged: bool = False
    """Whether a packaged row was run; otherwise the record itself was the row."""
    judged_by: JudgedBy | None = None
    """Who answered the calls to other model servers; `None` if there were none."""

    @property
    def rewarded(self) -> bool:
        """Whether it got a reward that counts: not one that was given because no judge could be asked."""
        return self.reward is not None and self.verdict != "blocked"

    def updated(self, **fields: Any) -> RowResult:
        return self.model_copy(update=fields)

    def concluded(self, diagnosis: Diagnosis, **fields: Any) -> RowResult:
        """The same with a diagnosis."""
        verdict, detail, evidence, need, _ = diagnosis
        return self.updated(verdict=verdict, cause=detail, evidence=evidence, need=need, **fields)


class CheckResult(Config):
    """The result of checking one environment of one nemo-gym release, and its record on disk."""

    schema_version: Literal[2] = 2
    environment: str
    kind: str
    """Directory of the release: resources_servers, environments, benchmarks; `config` for a user's own."""
    nemo_gym: str
    """Release."""
    gymgate: str
    """Version that checked it."""
    date: str
    verdict: Verdict
    detail: str = ""
    """The need, the cause, what is lacking, or the error."""
    evidence: str = ""
    """The line of a log or an error that shows it."""
    need: str = ""
    """For `blocked`: the kind of what is missing: one of `gymgate list`, or memory, file, service, conflict, setup, time."""
    matched: int = 0
    """Recorded rewards that are reproduced."""
    compared: int = 0
    """Recordings with a reward to compare with and an agent that still exists."""
    rewarded: bool = False
    """Whether a packaged row or a recorded one got a reward without a stand-in for a judge."""
    rewarded_by_stand_in: bool = False
    """Whether one got a reward with a fixed text as the judge's answer."""
    rows: tuple[RowResult, ...] = ()
    """The recorded rollouts; of the records that ship with gymgate only those that differ."""
    broken: tuple[str, ...] = ()
    """Recorded lines that could not be read, with the reason; they are skipped."""
    traceback: str = Field(default="", repr=False)
    """For `failed`: the last exception of a server, with the frames of the environment's own code."""

    config: str = ""
    """The environment's config that was started."""
    agents: tuple[str, ...] = ()
    """Implementations of its agents."""
    needs: tuple[str, ...] = ()
    """Kinds of needs read from its files before anything ran."""
    notes: tuple[str, ...] = ()
    """How it was started, where that was not as shipped."""
    options: tuple[str, ...] = ()
    """Options of `gymgate check` that changed what was run, such as `--sandbox docker`."""
    seconds: float = 0.0
    """Duration of the whole check, installing included."""
    settings: str = Field(default="", repr=False)
    """All options that it was made with."""

    machine: str = ""
    """Cores, memory and load of the machine while it was measured; empty if it was not."""
    deterministic: Deterministic | None = None
    trivial: Trivial | None = None
    failures: Failures | None = None
    cost: Cost | None = None
    shape: Shape | None = None
    policy: PolicyRewards | None = None
    oracle: Oracle | None = None
    data: Data | None = None
    missing: dict[str, str] = Field(default_factory=dict)
    """Why a section is `None`, by its name."""

    @property
    def name(self) -> str:
        """A name that is unique among releases and kinds."""
        return f"{self.kind}/{self.environment}-{self.nemo_gym}"

    @property
    def measured(self) -> bool:
        """Whether anything was measured besides the verdict."""
        return bool(self.machine)

    def concluded(self, diagnosis: Diagnosis, **fields: Any) -> CheckResult:
        """The same with a diagnosis."""
        return self.model_copy(update={**diagnosis._asdict(), **fields})

    def with_sections(self, names: Iterable[str], other: CheckResult) -> CheckResult:
        """This record with some sections of another one. One that the other lacks stays; if there is none, `missing` says
        why."""
        sections = {name: section for name in names if (section := getattr(other, name)) is not None}
        lacking = [name for name in names if name not in sections and getattr(self, name) is None]
        why = other.missing.get("all", "not measured")
        missing = {name: reason for name, reason in self.missing.items() if name not in sections}
        missing |= {name: other.missing.get(name, why) for name in lacking}
        about = {"machine": self.machine or other.machine, "settings": other.settings}
        return self.model_copy(update={**sections, **about, "missing": missing})


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """The gravest of some verdicts; `incomplete` if there are none."""
    return min(verdicts, key=_WORST_FIRST.index, default="incomplete")


def replayable(results: Sequence[RowResult]) -> list[RowResult]:
    """The results whose agent still exists; all of them if there is none."""
    return [row for row in results if not row.outdated] or list(results)


def same_reward(one: float, other: float) -> bool:
    """Equal but for rounding in the last digits of a printed number."""
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
