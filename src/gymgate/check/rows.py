"""Replaying an environment's recordings on its running stack."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from gymgate.catalog import EnvConfig, Environment, Need
from gymgate.check import evidence
from gymgate.check.causes import Setting, makes_prompts
from gymgate.check.judges import RecordedJudge, RecordedPolicy
from gymgate.check.model import Job, RowCheck, same_reward
from gymgate.check.ordered import OrderedPolicy
from gymgate.check.probe import UNASKED, Probe
from gymgate.check.recordings import Sample, Samples, packaged_rows
from gymgate.check.summary import NO_JUDGE, needed, rewarded
from gymgate.config import POLICY, RolloutLimits
from gymgate.errors import GymgateError
from gymgate.rollout import Rollout, RolloutError
from gymgate.rollout.outcome import NEVER_ASKED
from gymgate.stack import Policy, Stack

HOPELESS = 2
"""Recordings without an answer in time, after which the others are not tried."""
REPLAYS = 3
"""Times that a recording is replayed until its reward comes out."""
LATE_LOGS, LATE_LOG_S = 3, 0.5
"""Looks at the logs for what made a reward differ: those of Ray's workers arrive late."""
LOG_TAIL = 12_000
_LACKING = re.compile(
    r'"type":"missing","loc":\["body","([\w.]+)"' r"|RunRequest' object has no attribute '(\w+)'"
)


class Rows:
    """The recordings of one environment, one after the other: a judge's script belongs to one rollout at a time."""

    def __init__(
        self,
        stack: Stack,
        job: Job,
        environment: Environment,
        config: EnvConfig,
        judge: RecordedJudge,
        logs: Path,
        placeholders: Sequence[Setting] = (),
    ) -> None:
        self.hints: Sequence[Need] = config.needs
        self.placeholders = tuple(placeholders)
        self.probe = Probe(self._run, judge, config)
        self._stack = stack
        self._job = job
        self._policy = RecordedPolicy(judge)
        self._recorded = stack.register("recorded", self._policy, dialect="responses")
        self._ordered_policy = OrderedPolicy()
        self._ordered = stack.register("ordered", self._ordered_policy, dialect="responses")
        self._in_order = False
        """Whether that is how this environment's recordings came out before."""
        self._environment = environment
        self._config = config
        self._judge = judge
        self._logs = logs
        self._read: dict[Path, int] = {}

    async def check(self, samples: Samples) -> list[RowCheck]:
        """A result for each recording. Where none of them got a reward, packaged rows are tried with a policy that
        knows nothing, and the rows once more with a stand-in for the judge."""
        results: list[RowCheck] = []
        for sample in samples.samples:
            results.append(await self._replayed(sample))
            if len(results) >= HOPELESS and all(_hopeless(result) for result in results):
                return results
        if not any(rewarded(row) for row in results):
            await self.probe.run(packaged_rows(self._environment, config=self._config))
        return results

    async def _replayed(self, sample: Sample) -> RowCheck:
        """The recording's result; replayed again where the reward differs, since some scoring runs on time, and in
        the order of its answers where the agent's prompts are not in it."""
        if self._in_order and (check := await self._in_order_of(sample)) is not None:
            return check
        first = check = await self._replayed_once(sample, self._recorded)
        for _ in range(REPLAYS - 1):
            if check.verdict != "differs" or check.reward is None:
                break
            check = await self._replayed_once(sample, self._recorded)
            if check.verdict == "match":
                return check.model_copy(update={"cause": f"scored {first.reward:g} when first replayed"})
        if check.verdict == "match" or not makes_prompts(self._agent_type(sample)):
            return check
        return await self._in_order_of(sample) or check

    async def _in_order_of(self, sample: Sample) -> RowCheck | None:
        """What comes of a recording's answers in their order; `None` if there is no reward, or another one than
        recorded before any came out that way, which says nothing."""
        for _ in range(REPLAYS):
            if not self._ordered_policy.begin(sample.recording):
                return None
            check = await self._replayed_once(sample, self._ordered)
            if check.verdict == "match" or check.reward is None:
                break
        self._in_order = self._in_order or check.verdict == "match"
        says = self._in_order and check.reward is not None
        return check.model_copy(update={"cause": self._ordered_policy.how}) if says else None

    def _agent_type(self, sample: Sample) -> str:
        agents = self._stack.agents
        info = agents.get(sample.agent or "") or next(iter(agents.values()), None)
        return info.type if info is not None else ""

    async def _replayed_once(self, sample: Sample, policy: Policy) -> RowCheck:
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
        rollout = await self._run(sample.row, policy, sample.agent)
        if not rollout.policy_calls and (rollout.error is None or NEVER_ASKED in rollout.error.message):
            return RowCheck(**facts, **self._unasked())
        facts |= {"reward": rollout.reward, "status": rollout.status, "judged_by": self._judged_by(rollout)}
        if self._judge.refused:
            told = rollout.error.message if rollout.error else "the judge's failure was scored"
            return RowCheck(**facts, verdict="blocked", need=NO_JUDGE, error=told)
        if rollout.error is not None:
            return RowCheck(**facts, **self._explained(rollout.error, sample))
        return RowCheck(**facts, **await self._scored(rollout, recording.reward, sample.row))

    def _unasked(self) -> dict[str, Any]:
        """Verdict of a rollout that was scored though the policy was never asked: its agent could not."""
        need = evidence.missing_in(self.new_log(), hints=self.hints)
        if need is not None:
            return {"verdict": "blocked", "need": str(need), "cause": need.evidence}
        return {"verdict": "differs", "cause": UNASKED}

    async def _scored(
        self, rollout: Rollout, recorded: float | None, row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Verdict of a rollout that went through, a need that the environment took for a wrong answer included."""
        outcome = compared(rollout, recorded)
        if outcome["verdict"] != "differs":
            return outcome
        for _ in range(LATE_LOGS):
            need = evidence.missing_in(self.new_log(), verification(rollout, row), hints=self.hints)
            if need is not None:
                return {"verdict": "blocked", "need": f"{need}, and that was scored", "cause": need.evidence}
            await asyncio.sleep(LATE_LOG_S)
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
        if self._judge.judged_by is None and any(c.model_server != POLICY for c in rollout.calls):
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
        if error.type == "UnknownConversationError" and makes_prompts(self._agent_type(sample)):
            return {**values, "verdict": "differs", "cause": "its agent makes prompts that are not recorded"}
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
        lacking = [one or other for one, other in _LACKING.findall(error.message)]
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

    def new_log(self) -> str:
        """What the servers have logged since this was last asked."""
        return "\n".join(self._new(path) for path in sorted(self._logs.glob("*.log")))

    def whole_log(self) -> str:
        """The end of all that the servers have logged."""
        self._read.clear()
        return self.new_log()[-4000:]

    def _new(self, path: Path) -> str:
        text = path.read_text(errors="replace")
        start, self._read[path] = self._read.get(path, 0), len(text)
        return text[start:][-LOG_TAIL:]


def compared(rollout: Rollout, recorded: float | None) -> dict[str, Any]:
    """Verdict of a rollout that went through."""
    if rollout.reward is None:
        return {"verdict": "incomplete", "cause": f"the agent's answer has no reward ({rollout.status})"}
    if recorded is None:
        return {"verdict": "incomplete", "cause": "the record has no reward"}
    return {"verdict": "match" if same_reward(rollout.reward, recorded) else "differs"}


def verification(rollout: Rollout, row: Mapping[str, Any]) -> str:
    """What the environment says about how it scored, as text; what the row or the policy said is left out."""
    result = rollout.result or {}
    echoed = {"response", "responses_create_params", "generation", *row}
    return orjson.dumps({name: value for name, value in result.items() if name not in echoed}).decode()


def _hopeless(row: RowCheck) -> bool:
    """A failure that the next row would only repeat, slowly."""
    return row.error is not None and row.error.startswith("RolloutTimeoutError")
