"""From the results of an environment's recordings and packaged rows to the verdict on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gymgate.catalog import Environment
from gymgate.check.known import cause_of
from gymgate.check.model import NO_JUDGE, NOT_ASKED, CheckRequest, Diagnosis, RowResult, replayable, worst
from gymgate.check.needs import missing_in, names_of
from gymgate.check.replay import Replayer
from gymgate.config import Settings


def summarize(
    results: Sequence[RowResult],
    replayer: Replayer,
    environment: Environment,
    request: CheckRequest,
    made_up: Settings,
) -> dict[str, Any]:
    """Fields of the environment's result. `made_up` are values that its config lacks."""
    probe = replayer.probe
    rewarded = any(row.rewarded for row in results) or (probe.rewarded and not probe.by_stand_in)
    diagnosis = _diagnosis(results, replayer, environment, request)
    if made_up and (diagnosis.verdict in ("differs", "failed") or not (rewarded or probe.by_stand_in)):
        diagnosis = _for_want_of(made_up, _worst_row(results))
    if diagnosis.verdict == "failed":
        diagnosis = diagnosis._replace(log_tail=replayer.logs.tail())
    return {
        **diagnosis._replace(traceback=replayer.logs.traceback())._asdict(),
        "rows": tuple(results),
        "rewarded": rewarded,
        "rewarded_by_stand_in": probe.by_stand_in,
    }


def _worst_row(results: Sequence[RowResult]) -> RowResult | None:
    """The first result with the gravest verdict."""
    counted = replayable(results)
    verdict = worst(row.verdict for row in counted)
    return next((row for row in counted if row.verdict == verdict), None)


def _diagnosis(
    results: Sequence[RowResult], replayer: Replayer, environment: Environment, request: CheckRequest
) -> Diagnosis:
    row = _worst_row(results)
    if row is None:
        return _with_probe(Diagnosis("incomplete", "no recording"), replayer)
    if row.verdict == "incomplete":
        cause = cause_of(environment.name) or row.cause or ""
        return _with_probe(Diagnosis("incomplete", cause, row.error or ""), replayer)
    if row.verdict == "differs":
        known = cause_of(environment.name, _verifiers(environment))
        return Diagnosis("differs", known or row.cause or "cause not known", _differences(results))
    if row.verdict == "match":
        return Diagnosis("match", _causes_of_matches(results))
    evidence = (row.cause if row.need else None) or row.error or ""
    return Diagnosis(row.verdict, row.need or row.cause or row.error or "", evidence)


def _verifiers(environment: Environment) -> list[str]:
    """Implementations of its resources servers."""
    servers = [server for config in environment.configs for server in config.servers]
    return list(dict.fromkeys(server.type for server in servers if server.kind == "resources_servers"))


def _for_want_of(made_up: Settings, row: RowResult | None) -> Diagnosis:
    """The diagnosis if a reward differs, or does not come, with a value that was made up."""
    seen = (row.need or row.error or row.cause or "") if row is not None else ""
    return Diagnosis("blocked", f"config: a value for {names_of(made_up)}; a made-up one lets it start", seen)


def _with_probe(diagnosis: Diagnosis, replayer: Replayer) -> Diagnosis:
    """The diagnosis on an environment without a recording to compare with, and what packaged rows showed."""
    probe = replayer.probe
    if probe.judge_missing:
        return Diagnosis("blocked", NO_JUDGE, "a packaged row's judge was called")
    if probe.rewarded:
        return diagnosis
    errors = [rollout.error for rollout in probe.rollouts if rollout.error is not None]
    messages = [error.message for error in errors]
    need = missing_in(*messages, replayer.logs.new(), hints=replayer.hints) if probe.rollouts else None
    if need is not None:
        return need.diagnosis
    if errors:
        return diagnosis._replace(evidence=f"a packaged row gives {errors[0].type}: {errors[0].message}")
    return diagnosis._replace(evidence=NOT_ASKED) if probe.rollouts else diagnosis


def _causes_of_matches(results: Sequence[RowResult]) -> str:
    """How rewards came out that did not at once, or not from the recorded conversation."""
    causes = Counter(row.cause for row in results if row.verdict == "match" and row.cause)
    return "; ".join(f"{count} of {len(results)}: {cause}" for cause, count in causes.items())


def _differences(results: Sequence[RowResult]) -> str:
    texts = [
        f"{row.recording} recorded {row.recorded}, got {row.reward if row.reward is not None else row.error}"
        for row in results
        if row.verdict == "differs"
    ]
    return "; ".join(text[:300] for text in texts[:5])
