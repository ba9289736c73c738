"""From the results of an environment's recordings and packaged rows to the verdict on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gymgate.gym.catalog import Environment
from gymgate.quality.diagnosis import missing_in
from gymgate.quality.known import cause_of
from gymgate.quality.model import (
    NO_JUDGE,
    NOT_ASKED,
    CheckResult,
    Diagnosis,
    RowResult,
    replayable,
    worst_verdict,
)
from gymgate.quality.replay import Replayer


def summarize(
    check: CheckResult, results: Sequence[RowResult], replayer: Replayer, environment: Environment
) -> CheckResult:
    """Return the environment's result with its verdict and rows."""
    trial = replayer.trial
    diagnosis = _diagnosis(results, replayer, environment)
    return check.concluded(
        diagnosis._replace(traceback=replayer.logs.traceback()),
        rows=tuple(results),
        matched=sum(row.verdict == "match" for row in results),
        compared=sum(row.recorded is not None and not row.outdated for row in results),
        rewarded=any(row.rewarded for row in results) or (trial.rewarded and not trial.by_stand_in),
        rewarded_by_stand_in=trial.by_stand_in,
    )


def _diagnosis(results: Sequence[RowResult], replayer: Replayer, environment: Environment) -> Diagnosis:
    counted = replayable(results)
    verdict = worst_verdict(row.verdict for row in counted)
    row = next((row for row in counted if row.verdict == verdict), None)
    if row is None:
        return _with_trial(Diagnosis("incomplete", "no recording"), replayer)
    if verdict == "incomplete":
        cause = cause_of(environment.name) or row.cause
        return _with_trial(Diagnosis("incomplete", cause, row.error), replayer)
    if verdict == "differs":
        servers = [server for config in environment.configs for server in config.servers]
        verifiers = [server.type for server in servers if server.kind == "resources_servers"]
        reason = cause_of(environment.name, verifiers)
        return Diagnosis("differs", reason or row.cause or "cause not known", _differences(results))
    if verdict == "match":
        causes = Counter(row.cause for row in results if row.verdict == "match" and row.cause)
        return Diagnosis("match", "; ".join(f"{n} of {len(results)}: {cause}" for cause, n in causes.items()))
    return Diagnosis(verdict, row.cause or row.error, row.evidence or row.error, row.need)


def _with_trial(diagnosis: Diagnosis, replayer: Replayer) -> Diagnosis:
    """The diagnosis on an environment without a recording to compare with, and what packaged rows showed."""
    trial = replayer.trial
    if trial.judge_missing:
        return Diagnosis("blocked", NO_JUDGE, "a packaged row's judge was called", "judge")
    if trial.rewarded or not trial.rollouts:
        return diagnosis
    errors = [rollout.error for rollout in trial.rollouts if rollout.error is not None]
    if missing := missing_in(*(error.message for error in errors), replayer.logs.new()):
        return missing.diagnosis
    if errors:
        return diagnosis._replace(evidence=f"a packaged row gives {errors[0].type}: {errors[0].message}")
    return diagnosis._replace(evidence=NOT_ASKED)


def _differences(results: Sequence[RowResult]) -> str:
    texts = [
        f"{row.recording} recorded {row.recorded}, got {row.reward if row.reward is not None else row.error}"
        for row in results
        if row.verdict == "differs"
    ]
    return "; ".join(text[:300] for text in texts[:5])
