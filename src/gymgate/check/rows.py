"""Replaying an environment's recordings on its running stack, and what the outcomes add up to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from gymgate.catalog import Environment, Need
from gymgate.check import evidence
from gymgate.check.causes import cause_of
from gymgate.check.judges import RecordedJudge, RecordedPolicy
from gymgate.check.model import Check, Job, RowCheck, same_reward, worst
from gymgate.check.recordings import Sample, Samples, packaged_rows
from gymgate.config import RolloutLimits
from gymgate.errors import GymgateError
from gymgate.rollout import Rollout, RolloutError
from gymgate.stack import Policy, Stack

SAID = "I do not know."
"""What the policy answers where no recording can be played, to see whether a reward comes back at all."""
SAID_OTHERWISE = "the environment said something else than recorded"
PROBES = 2
NO_JUDGE = "judge: the record does not hold its answers; name an endpoint with --model"
LOG_TAIL = 12_000
_LACKING = re.compile(r'"type":"missing","loc":\["body","([\w.]+)"')


class Rows:
    """The recordings of one environment, one after the other: a judge's script belongs to one rollout at a time."""

    def __init__(
        self,
        stack: Stack,
        job: Job,
        environment: Environment,
        judge: RecordedJudge,
        logs: Path,
        hints: Sequence[Need],
    ) -> None:
        self.hints = hints
        self.rewarded_by_stand_in = False
        self.judge_missing = False
        """Whether a packaged row's judge was called, and nobody could answer."""
        self.probed: list[Rollout] = []
        self._stack = stack
        self._job = job
        self._policy = RecordedPolicy(judge)
        self._recorded = stack.register("recorded", self._policy, dialect="responses")
        self._environment = environment
        self._judge = judge
        self._logs = logs
        self._read: dict[Path, int] = {}

    async def check(self, samples: Samples) -> list[RowCheck]:
        """A result for each recording. Where none of them got a reward, packaged rows are tried with a policy that
        knows nothing, and the rows once more with a stand-in for the judge."""
        results: list[RowCheck] = []
        for sample in samples.samples:
            results.append(await self._replayed(sample))
            if len(results) >= PROBES and all(_hopeless(result) for result in results):
                return results
        if not any(_rewarded(row) for row in results):
            await self._probe(samples)
        return results

    async def _replayed(self, sample: Sample) -> RowCheck:
        """The recording's result; replayed once more where the reward differs, since some scoring runs on time."""
        first = await self._replayed_once(sample)
        if first.verdict != "differs" or first.reward is None:
            return first
        second = await self._replayed_once(sample)
        if second.reward == first.reward:
            return first
        return second.model_copy(update={"cause": f"scored {first.reward:g} when first replayed"})

    async def _replayed_once(self, sample: Sample) -> RowCheck:
        recording = sample.recording
        facts: dict[str, Any] = {
            "recording": sample.name,
            "recorded": recording.reward,
            "packaged": sample.packaged,
        }
        if not recording.turns:
            return RowCheck(
                **facts, verdict="incomplete", cause="the record keeps nothing that the policy said"
            )
        self.new_log()
        self._judge.begin(recording.raw)
        self._policy.begin(recording)
        rollout = await self._run(sample.row, self._recorded, sample.agent)
        facts |= {"reward": rollout.reward, "status": rollout.status, "judged_by": self._judged_by(rollout)}
        if self._judge.refused:
            told = rollout.error.message if rollout.error else "the judge's failure was scored"
            return RowCheck(**facts, verdict="blocked", need=NO_JUDGE, error=told)
        if rollout.error is not None:
            return RowCheck(**facts, **self._explained(rollout.error, sample))
        return RowCheck(**facts, **self._scored(rollout, recording.reward))

    def _scored(self, rollout: Rollout, recorded: float | None) -> dict[str, Any]:
        """Verdict of a rollout that went through, a need that the environment took for a wrong answer included."""
        outcome = compared(rollout, recorded)
        if outcome["verdict"] == "differs":
            need = evidence.missing_in(self.new_log(), _verification(rollout), hints=self.hints)
            if need is not None:
                return {"verdict": "blocked", "need": f"{need}, and that was scored", "cause": need.evidence}
        return outcome

    async def _run(self, row: dict[str, Any], policy: Policy, agent: str | None = None) -> Rollout:
        limits = RolloutLimits(timeout_s=self._job.row_timeout_s, max_calls=200)
        agent = agent if agent in self._stack.agents else None
        row = {key: value for key, value in row.items() if key != "agent_ref"}
        try:
            return await self._stack.run(row, policy=policy, agent=agent, limits=limits)
        except GymgateError as error:
            described = RolloutError(kind="data", message=str(error), type=type(error).__name__)
            return Rollout(
                id="", environment=self._environment.name, agent="", status="failed", error=described
            )

    def _judged_by(self, rollout: Rollout) -> str | None:
        if self._judge.judged_by is None and any(c.model_server != "policy_model" for c in rollout.calls):
            return "endpoint"
        return self._judge.judged_by

    def _explained(self, error: RolloutError, sample: Sample) -> dict[str, Any]:
        """Verdict, need and cause of a rollout that failed."""
        told = f"{error.type}: {error.message}"
        values: dict[str, Any] = {"error": told[:1000]}
        if error.type == "UnknownConversationError" and sample.agent not in (None, *self._stack.agents):
            return {
                **values,
                "verdict": "incomplete",
                "cause": f"its agent {sample.agent!r} no longer exists",
            }
        if error.type == "UnknownConversationError" and "differs at message 1 " in error.message:
            return {
                **values,
                "verdict": "blocked",
                "need": NO_JUDGE,
                "cause": "the policy's own model is the judge",
            }
        if error.type == "UnknownConversationError":
            return {
                **values,
                "verdict": "differs",
                "cause": "the environment said something else than recorded",
            }
        lacking = _LACKING.findall(error.message)
        if error.kind == "data" or lacking:
            whose = "the packaged row" if sample.packaged else "no packaged row was recorded, and the record"
            fields = ", ".join(dict.fromkeys(lacking)) or "what the verifier requires"
            return {**values, "verdict": "incomplete", "cause": f"{whose} lacks {fields}"}
        need = evidence.missing_in(error.message, self.new_log(), hints=self.hints)
        if need is not None:
            seen = needed(need)
            name = "need" if seen["verdict"] == "blocked" else "cause"
            return {**values, "verdict": seen["verdict"], "cause": need.evidence, name: seen["detail"]}
        if error.type == "RolloutTimeoutError" and self.hints:
            kinds = ", ".join(sorted({need.kind for need in self.hints}))
            told = (
                f"time: no result within {self._job.row_timeout_s:g} s (needs read from its files: {kinds})"
            )
            return {**values, "verdict": "blocked", "need": told}
        return {**values, "verdict": "failed"}

    async def _probe(self, samples: Samples) -> None:
        """Whether any reward comes back at all: packaged rows and no judge first, then with a stand-in."""
        rows = packaged_rows(self._environment)[:PROBES]
        for stand_in in (False, True):
            for row in rows:
                self._judge.begin(None, stand_in=stand_in)
                rollout = await self._run(row, say_nothing)
                if self._judge.refused:
                    self.judge_missing = True
                    continue
                self.probed.append(rollout)
                if rollout.reward is not None:
                    self.rewarded_by_stand_in = bool(self._judge.calls and stand_in)
                    return
            if not self.judge_missing:
                return

    def new_log(self) -> str:
        """What the servers have logged since this was last asked."""
        return "\n".join(self._new(path) for path in sorted(self._logs.glob("*.log")))

    def _new(self, path: Path) -> str:
        text = path.read_text(errors="replace")
        start, self._read[path] = self._read.get(path, 0), len(text)
        return text[start:][-LOG_TAIL:]


async def say_nothing(request: dict[str, Any]) -> dict[str, Any]:
    """A chat-completions policy without an idea."""
    choice = {"index": 0, "message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "none",
        "choices": [choice],
    }


def compared(rollout: Rollout, recorded: float | None) -> dict[str, Any]:
    """Verdict of a rollout that went through."""
    if rollout.reward is None:
        return {"verdict": "incomplete", "cause": f"the agent's answer has no reward ({rollout.status})"}
    if recorded is None:
        return {"verdict": "incomplete", "cause": "the record has no reward"}
    return {"verdict": "match" if same_reward(rollout.reward, recorded) else "differs"}


def _verification(rollout: Rollout) -> str:
    """What the environment says about how it scored, as text."""
    result = rollout.result or {}
    own = {
        name: value for name, value in result.items() if name not in ("response", "responses_create_params")
    }
    return orjson.dumps(own).decode()


def replayable(results: Sequence[RowCheck]) -> list[RowCheck]:
    """Without those of an agent that no longer exists, unless there are no others."""
    return [row for row in results if not row.outdated] or list(results)


def _rewarded(row: RowCheck) -> bool:
    """Whether it got a reward that means something: none that was given because a judge could not be asked."""
    return row.reward is not None and row.verdict != "blocked"


def _hopeless(row: RowCheck) -> bool:
    """A failure that the next row would only repeat, slowly."""
    return row.error is not None and row.error.startswith("RolloutTimeoutError")


def summarised(results: Sequence[RowCheck], rows: Rows, environment: Environment, job: Job) -> dict[str, Any]:
    """The environment's verdict with its detail and evidence."""
    counted = replayable(results)
    verdict = worst(row.verdict for row in counted)
    chosen = next((row for row in counted if row.verdict == verdict), None)
    rewarded = any(_rewarded(row) for row in results)
    probed = any(rollout.reward is not None for rollout in rows.probed)
    values: dict[str, Any] = {
        "verdict": verdict,
        "rows": tuple(results),
        "rewarded": rewarded or (probed and not rows.rewarded_by_stand_in),
        "rewarded_by_stand_in": rows.rewarded_by_stand_in,
    }
    if chosen is None or verdict == "incomplete":
        told = {
            "detail": (chosen.cause or "") if chosen else "no recording",
            "evidence": (chosen.error or "") if chosen else "",
        }
        return values | told | {name: value for name, value in probe_outcome(rows).items() if value}
    if verdict == "differs":
        cause = cause_of(environment.name, job.version) or chosen.cause or "cause not known"
        values |= {"detail": cause, "evidence": _difference(results)}
    elif verdict != "match":
        values |= {
            "detail": chosen.need or chosen.cause or chosen.error or "",
            "evidence": (chosen.cause if chosen.need else None) or chosen.error or "",
        }
    if verdict == "failed":
        values["log_tail"] = _whole_log(rows)
    return values


def needed(need: evidence.Missing) -> dict[str, Any]:
    """Verdict, detail and evidence of a need: a file that the release should have makes it incomplete."""
    if need.shipped is not None:
        return {
            "verdict": "incomplete",
            "detail": f"the release does not ship {need.shipped}",
            "evidence": need.evidence,
        }
    return {"verdict": "blocked", "detail": str(need), "evidence": need.evidence}


def probe_outcome(rows: Rows) -> dict[str, Any]:
    """What packaged rows showed, for an environment without a recording that can be played."""
    if rows.judge_missing:
        seen = "a packaged row's judge was called"
        return {"verdict": "blocked", "detail": NO_JUDGE, "evidence": seen}
    if any(rollout.reward is not None for rollout in rows.probed):
        return {"verdict": "incomplete"}
    errors = [rollout.error for rollout in rows.probed if rollout.error is not None]
    if not errors:
        return {"verdict": "incomplete"}
    need = evidence.missing_in(*(error.message for error in errors), rows.new_log(), hints=rows.hints)
    if need is not None:
        return needed(need)
    return {
        "verdict": "incomplete",
        "evidence": f"a packaged row gives {errors[0].type}: {errors[0].message}",
    }


def _difference(results: Sequence[RowCheck]) -> str:
    told = [
        f"{row.recording} recorded {row.recorded}, got {row.reward if row.reward is not None else row.error}"
        for row in results
        if row.verdict == "differs"
    ]
    return "; ".join(text[:300] for text in told[:5])


def _whole_log(rows: Rows) -> str:
    rows._read.clear()
    return rows.new_log()[-4000:]


__all__ = ["Check", "Rows", "compared", "summarised"]
