"""The request and the result of a check. The result is also the record on disk, whose JSON schema is in the docs."""

from __future__ import annotations

import datetime
import math
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

import gymgate
from gymgate.core import codec
from gymgate.core.config import Config, EnvironmentConfig, HTTPEndpoint, RolloutLimits
from gymgate.core.errors import ErrorKind
from gymgate.gym.catalog.entries import AGENT_KIND, PACKAGED_KINDS
from gymgate.quality.sections import (
    NOT_HERE,
    Cost,
    Data,
    Deterministic,
    Failures,
    Oracle,
    PolicyRewards,
    ProbeName,
    Probes,
    Shape,
)
from gymgate.rollouts import RolloutStatus
from gymgate.runs.described.spec import RolloutSpec

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


SectionName = Literal["shape", "deterministic", "cost", "oracle", "probes", "policy", "failures"]
"""A section of a record that needs a running environment."""
WITHOUT_RECORDINGS: frozenset[SectionName] = frozenset({"shape", "oracle", "probes", "policy"})
"""Those that need no replayed recording."""


class Thresholds(Config):
    """Thresholds that a record must meet."""

    max_constant_reward: float | None = None
    """Highest mean reward that an empty answer, a fixed sentence or the prompt may earn. Another row's best answer may earn up to
    half the recorded mean, if that is more."""
    deterministic: bool = False
    """Scoring again gives the same rewards."""
    reproducible: bool = False
    """Every recorded reward is reproduced, by the first replay."""
    honest: bool = False
    """No reward if the judge, a tool or the policy fails."""
    min_oracle_reward: float | None = None
    """Lowest mean reward that the rows' right answers, in their best phrasing, may earn."""
    no_flags: bool = False
    """No probe flags a row."""
    clean_rows: bool = False
    """No row equals another, no prompt says its answer, no row is in two splits."""


class CheckRequest(RolloutSpec):
    """One environment to check, which is the only one of `stack`.

    Its config, if none is set, is the one with the recorded agents. Judges without an endpoint give the answers that were
    recorded.
    """

    limits: RolloutLimits = RolloutLimits(timeout_s=180.0)
    """Bounds on each rollout."""
    timeout_s: float = Field(default=900.0, gt=0)
    """Seconds per environment."""
    memory_gb: float = Field(default=8.0, gt=0)
    """Memory that an environment may use."""
    measure: bool = False
    """Whether to measure its quality, within `timeout_s` more seconds."""
    policy: HTTPEndpoint | None = None
    """A real model to measure too."""
    rows: int | None = Field(default=None, ge=1)
    """Packaged rows for the model of -b. [all]"""
    repeats: int = Field(default=1, ge=1)
    """Rollouts of each of them."""
    sections: Annotated[tuple[SectionName, ...], AfterValidator(lambda names: tuple(sorted({*names})))] = ()
    """Sections of the record to measure; empty: all."""
    probes: Annotated[tuple[ProbeName, ...], AfterValidator(lambda names: tuple(sorted({*names})))] = ()
    """Run only this probe, and show each row that it flags, with the answer. [all]"""
    replay: bool = True
    """Whether to replay the recordings; without it there is no verdict."""

    @classmethod
    def stack_defaults(cls) -> Mapping[str, Any]:
        return {"start_timeout_s": 150.0}

    @property
    def environment(self) -> EnvironmentConfig:
        """The environment."""
        return self.stack.environments[0]

    @property
    def name(self) -> str:
        """The environment's name, or the path of its config."""
        return self.environment.name

    @property
    def kind_and_name(self) -> tuple[str, str]:
        """Directory of the release (`config` for a user's own) and name, as in the record."""
        kind, _, name = self.name.rpartition("/")
        if name.endswith((".yaml", ".yml")):
            return "config", Path(name).stem
        return (kind if kind in (*PACKAGED_KINDS, AGENT_KIND) else "config") if kind else PACKAGED_KINDS[
            0
        ], name

    @property
    def record_name(self) -> str:
        """Name of the record: `KIND/NAME-RELEASE`."""
        return "{}/{}-{}".format(*self.kind_and_name, self.stack.runtime.version)

    @property
    def settings(self) -> str:
        """Everything but the environment that a result depends on; a result with equal settings is not checked again."""
        value = self.model_dump(mode="json", exclude={"replay": True, "stack": {"state_dir"}})
        del value["stack"]["environments"][0]["name"]
        return codec.dumps(value).decode()

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `gymgate check` that change what is run. Endpoints and files of this machine go by their names."""
        return tuple(self._options())

    def _options(self) -> Iterator[str]:
        environment = self.environment
        configs = (environment.config,) if isinstance(environment.config, str) else environment.config or ()
        yield from (f"--config {Path(name).name}" for name in configs)
        if environment.sandbox:
            yield f"--sandbox {Path(environment.sandbox).name}"
        for key, value in environment.overrides:
            text = value if isinstance(value, str) else codec.dumps(value).decode()
            yield "--set " + shlex.quote(f"{key}={text}")
        for name, endpoint in self.stack.models:
            yield f"--judge {name}={endpoint if isinstance(endpoint, str) else 'URL'}"
        for name in self.stack.env_vars:
            yield f"--env-var {name}"

    def result(self, began: float, **fields: Any) -> CheckResult:
        """A finished result of this request, begun at `began` (`time.monotonic()`)."""
        return self.finish(self.new_result(**fields), began)

    def new_result(self, **fields: Any) -> CheckResult:
        """A result of this request, which `finish` completes."""
        about = {
            "nemo_gym": self.stack.runtime.version,
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
            if not self.sections:  # of single ones `missing` says why, and a record keeps what it has
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
    first: float | None = None
    """The reward of the first replay, if another replay gave the recorded one."""
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
    probes: Probes | None = None
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
