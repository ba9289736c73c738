"""The record: a check's verdict and everything that was measured, as one versioned value."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field

import gymgate
from gymgate.check.model import CheckResult, Verdict
from gymgate.check.record.sections import (
    Cost,
    Deterministic,
    Failures,
    PolicyRewards,
    Sections,
    Shape,
    Trivial,
)
from gymgate.config import Config

DIFFERENCES = 5


class Difference(Config):
    """A recorded reward that did not come out again."""

    rollout: str
    recorded: float
    reward: float | None = None
    """`None`: there was no reward."""
    reason: str = ""


class Reproducible(Config):
    """Whether the recorded rewards come out again."""

    verdict: Verdict
    matched: int
    """Recorded rewards that came out again."""
    compared: int
    """Recordings with a reward to compare with and an agent that still exists."""
    detail: str = ""
    """The need that is missing, the cause of a difference, or the error."""
    differences: tuple[Difference, ...] = ()
    """The first of the rewards that differ."""


class QualityRecord(Config):
    """The quality record of one environment of one nemo-gym release."""

    schema_version: Literal[1] = 1
    environment: str
    kind: str
    """Directory of the release: resources_servers, environments, benchmarks; `config` for a user's own."""
    nemo_gym: str
    """Release."""
    gymgate: str
    """Version that measured it."""
    date: str
    machine: str = ""
    """Cores, memory and load of the machine while it was measured."""
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
    reproducible: Reproducible
    deterministic: Deterministic | None = None
    trivial: Trivial | None = None
    failures: Failures | None = None
    cost: Cost | None = None
    shape: Shape | None = None
    policy: PolicyRewards | None = None
    missing: dict[str, str] = Field(default_factory=dict)
    """Why a section is `None`, by its name."""
    seconds: float = 0.0
    """Duration of the whole check, installing included."""
    settings: str = Field(default="", repr=False)
    """The options that it was made with."""

    @property
    def name(self) -> str:
        """A name that is unique among releases and kinds."""
        return f"{self.kind}/{self.environment}-{self.nemo_gym}"


def record_of(result: CheckResult) -> QualityRecord:
    """Return the record of a check."""
    sections = result.sections or Sections()
    fields = {name: getattr(sections, name) for name in Sections.model_fields}
    if result.sections is None:
        fields["missing"] = {"all": f"nothing could be run: {result.detail or result.verdict}"}
    differing = [row for row in result.rows if row.verdict == "differs" and row.recorded is not None]
    return QualityRecord(
        environment=result.environment,
        kind=result.kind,
        nemo_gym=result.version,
        gymgate=gymgate.__version__,
        date=result.date,
        config=result.config,
        agents=result.agents,
        needs=result.needs,
        notes=result.notes,
        options=options_of(result.settings),
        reproducible=Reproducible(
            verdict=result.verdict,
            matched=result.matched,
            compared=result.compared,
            detail=result.detail,
            differences=tuple(
                Difference(
                    rollout=row.recording,
                    recorded=row.recorded or 0.0,
                    reward=row.reward,
                    reason=(row.cause or row.error or "")[:300],
                )
                for row in differing[:DIFFERENCES]
            ),
        ),
        seconds=result.seconds,
        settings=result.settings,
        **fields,
    )


def options_of(settings: str) -> tuple[str, ...]:
    """Return the options of `gymgate check` in a result's settings that changed what was run."""
    return tuple(_options(orjson.loads(settings or "{}")))


def _options(settings: Mapping[str, Any]) -> Iterator[str]:
    """The options in a check's settings. Endpoints and files of this machine go by their names only."""
    if sandbox := settings.get("sandbox"):
        yield f"--sandbox {Path(sandbox).name}"
    for key, value in settings.get("overrides", ()):
        yield "--set " + shlex.quote(
            f"{key}={value if isinstance(value, str) else orjson.dumps(value).decode()}"
        )
    for name, endpoint in settings.get("models", ()):
        yield f"--judge {name}={endpoint if isinstance(endpoint, str) else 'URL'}"
    for name in settings.get("env_vars", ()):
        yield f"--env-var {name}"
