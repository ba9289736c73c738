"""What the outcomes of an environment's recordings and packaged rows add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from gymgate.catalog import Environment, Need
from gymgate.check import evidence
from gymgate.check.causes import Setting, cause_of
from gymgate.check.model import Job, RowCheck, worst
from gymgate.check.placeholders import named
from gymgate.check.probe import UNASKED, Probe

NO_JUDGE = "judge: the record does not hold its answers; name an endpoint with --model"


class Replayed(Protocol):
    """What is left to ask after the recordings were replayed."""

    hints: Sequence[Need]
    placeholders: tuple[Setting, ...]
    probe: Probe

    def new_log(self) -> str: ...
    def whole_log(self) -> str: ...


def summarised(
    results: Sequence[RowCheck], rows: Replayed, environment: Environment, job: Job
) -> dict[str, Any]:
    """The environment's verdict with its detail and evidence."""
    counted = replayable(results)
    verdict = worst(row.verdict for row in counted)
    chosen = next((row for row in counted if row.verdict == verdict), None)
    probe = rows.probe
    got = any(rewarded(row) for row in results) or (probe.rewarded and not probe.by_stand_in)
    values: dict[str, Any] = {
        "verdict": verdict,
        "rows": tuple(results),
        "rewarded": got,
        "rewarded_by_stand_in": probe.by_stand_in,
    }
    if rows.placeholders and (verdict in ("differs", "failed") or not (got or probe.by_stand_in)):
        return values | _for_want_of(rows.placeholders, chosen)
    if chosen is None or verdict == "incomplete":
        known = cause_of(environment.name, job.version) if chosen else None
        told = {
            "detail": (known or chosen.cause or "") if chosen else "no recording",
            "evidence": (chosen.error or "") if chosen else "",
        }
        return values | told | {name: value for name, value in probe_outcome(rows).items() if value}
    if verdict == "differs":
        cause = (
            cause_of(environment.name, job.version, _scorers(environment))
            or chosen.cause
            or "cause not known"
        )
        values |= {"detail": cause, "evidence": _difference(results)}
    elif verdict == "match":
        values["detail"] = _told_of_matches(results)
    else:
        values |= {
            "detail": chosen.need or chosen.cause or chosen.error or "",
            "evidence": (chosen.cause if chosen.need else None) or chosen.error or "",
        }
    if verdict == "failed":
        values["log_tail"] = rows.whole_log()
    return values


def replayable(results: Sequence[RowCheck]) -> list[RowCheck]:
    """Without those of an agent that no longer exists, unless there are no others."""
    return [row for row in results if not row.outdated] or list(results)


def rewarded(row: RowCheck) -> bool:
    """Whether it got a reward that means something: none that was given because a judge could not be asked."""
    return row.reward is not None and row.verdict != "blocked"


def _scorers(environment: Environment) -> list[str]:
    """Implementations of its resources servers."""
    servers = [server for config in environment.configs for server in config.servers]
    return list(dict.fromkeys(server.type for server in servers if server.kind == "resources_servers"))


def _for_want_of(placeholders: Sequence[Setting], chosen: RowCheck | None) -> dict[str, Any]:
    """What came out otherwise than recorded, or not at all, with a value that was made up."""
    seen = (chosen.need or chosen.error or chosen.cause or "") if chosen is not None else ""
    return {
        "verdict": "blocked",
        "detail": f"config: a value for {named(placeholders)}; a made-up one lets it start",
        "evidence": seen,
    }


def needed(need: evidence.Missing, beside: str = "") -> dict[str, Any]:
    """Verdict, detail and evidence of a need: a file that the release should have makes it incomplete."""
    if need.shipped is not None:
        return {
            "verdict": "incomplete",
            "detail": f"the release does not ship {need.shipped}",
            "evidence": need.evidence,
        }
    return {"verdict": "blocked", "detail": f"{need}{beside}", "evidence": need.evidence}


def probe_outcome(rows: Replayed) -> dict[str, Any]:
    """What packaged rows showed, for an environment without a recording that can be played."""
    if rows.probe.judge_missing:
        seen = "a packaged row's judge was called"
        return {"verdict": "blocked", "detail": NO_JUDGE, "evidence": seen}
    if rows.probe.rewarded:
        return {"verdict": "incomplete"}
    errors = [rollout.error for rollout in rows.probe.rollouts if rollout.error is not None]
    need = evidence.missing_in(*(error.message for error in errors), rows.new_log(), hints=rows.hints)
    if need is not None and (errors or rows.probe.rollouts):
        return needed(need)
    if not errors:
        return {"verdict": "incomplete", "evidence": UNASKED if rows.probe.rollouts else ""}
    return {
        "verdict": "incomplete",
        "evidence": f"a packaged row gives {errors[0].type}: {errors[0].message}",
    }


def _told_of_matches(results: Sequence[RowCheck]) -> str:
    """How rewards came out that did not at once, or not from the recorded conversation."""
    causes = Counter(row.cause for row in results if row.verdict == "match" and row.cause)
    return "; ".join(f"{count} of {len(results)}: {cause}" for cause, count in causes.items())


def _difference(results: Sequence[RowCheck]) -> str:
    told = [
        f"{row.recording} recorded {row.recorded}, got {row.reward if row.reward is not None else row.error}"
        for row in results
        if row.verdict == "differs"
    ]
    return "; ".join(text[:300] for text in told[:5])
