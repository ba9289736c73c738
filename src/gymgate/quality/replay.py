"""Replaying an environment's recordings on its running stack."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.config import POLICY, RolloutLimits
from gymgate.core.errors import GymgateError, PolicyNeverAskedError, UnknownConversationError
from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gateway.replay.recording import Recording
from gymgate.gym.catalog import EnvConfig, Environment
from gymgate.quality.diagnosis import MissingNeed, missing_fields, missing_in
from gymgate.quality.known import known
from gymgate.quality.model import (
    NO_JUDGE,
    NOT_ASKED,
    CheckRequest,
    Diagnosis,
    RowResult,
    same_reward,
)
from gymgate.quality.recorded_models import OrderedPolicy, RecordedJudge, RecordedPolicy
from gymgate.quality.recordings import RecordedRow, RowData, packaged_rows
from gymgate.quality.reward_trial import RewardTrial
from gymgate.quality.tracebacks import last_traceback
from gymgate.rollouts import Rollout, RolloutError
from gymgate.rollouts.row_fields import ENVIRONMENT_SERVER
from gymgate.stack import Policy, Stack

MAX_TIMEOUTS = 2
"""Recordings without an answer in time, after which the others are not tried."""
REPLAYS = 3
"""How often a recording is replayed until its reward comes out: some scoring depends on time."""
MAX_CALLS = 200
"""Policy calls of a rollout."""
LATE_LOGS, LATE_LOG_S = 3, 0.5
"""Looks at the logs for what made a reward differ or a rollout fail, and seconds between them: Ray's workers log late."""
LOG_TAIL = 12_000


class ServerLogs:
    """The logs of an environment's servers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new(self) -> str:
        """Everything logged since this was last called, at most the last `LOG_TAIL` characters of each file."""
        texts = []
        for path in sorted(self._directory.glob("*.log")):
            text = path.read_text(errors="replace")
            texts.append(text[self._read.get(path, 0) :][-LOG_TAIL:])
            self._read[path] = len(text)
        return "\n".join(texts)

    async def need(self) -> MissingNeed | None:
        """The need that is shown by what was logged since the last look, or is a little later."""
        for _ in range(LATE_LOGS):
            if need := missing_in(self.new()):
                return need
            await asyncio.sleep(LATE_LOG_S)
        return None

    def traceback(self) -> str:
        """The last traceback in the first server's log that has one."""
        paths = (path for path in sorted(self._directory.glob("*.log")) if path.name != "config.log")
        texts = (path.read_text(errors="replace") for path in paths)
        return next(filter(None, map(last_traceback, texts)), "")


class Replayer:
    """Replays recordings one after the other, because a judge's answers belong to one rollout at a time."""

    def __init__(
        self,
        stack: Stack,
        request: CheckRequest,
        environment: Environment,
        config: EnvConfig,
        judge: RecordedJudge,
        logs: ServerLogs,
    ) -> None:
        self.logs = logs
        self.trial = RewardTrial(self.run, judge, config)
        self._stack = stack
        self._request = request
        self._environment = environment
        self._config = config
        self._judge = judge
        self._policy = RecordedPolicy(judge)
        self._ordered_policy = OrderedPolicy()
        self._recorded = stack.register("recorded", self._ask_recorded, dialect="responses")
        self._ordered = stack.register("ordered", self._ordered_policy, dialect="responses")
        self._unknown: UnknownConversationError | None = None
        """The last question of the policy, since its recording began, that the record does not hold."""
        self._works_in_order = False
        """Whether a recording of this environment gave its reward when its answers were given in their order."""

    async def replay(self, recorded: Sequence[RecordedRow]) -> list[RowResult]:
        """A result for each recording. If none of them got a reward, packaged rows are tried."""
        results: list[RowResult] = []
        for recording in recorded:
            results.append(await self._result_of(recording))
            if len(results) >= MAX_TIMEOUTS and all(row.error_kind == "timeout" for row in results):
                return results
        if not any(result.rewarded for result in results):
            await self.trial.run(packaged_rows(self._environment, config=self._config))
        return results

    async def _result_of(self, recorded: RecordedRow) -> RowResult:
        """The recording's result. It is replayed again if its reward differs, and with its answers in their order if
        its agent makes prompts of its own."""
        if self._works_in_order and (result := await self._result_in_order(recorded)) is not None:
            return result
        first = result = await self._replay_once(recorded, self._recorded)
        for _ in range(REPLAYS - 1):
            if result.verdict != "differs" or result.reward is None:
                break
            result = await self._replay_once(recorded, self._recorded)
            if result.verdict == "match":
                return result.updated(
                    cause=f"scored {first.reward:g} when first replayed", first=first.reward
                )
        if result.verdict == "match" or not self._makes_prompts(recorded):
            return result
        return await self._result_in_order(recorded) or result

    async def _result_in_order(self, recorded: RecordedRow) -> RowResult | None:
        """The result with the recorded answers given in their order; `None` if there is no reward. A reward that
        differs counts only after another recording's came out, otherwise it shows nothing."""
        for _ in range(REPLAYS):
            if not self._ordered_policy.begin(recorded.recording):
                return None
            result = await self._replay_once(recorded, self._ordered)
            if result.verdict == "match" or result.reward is None:
                break
        self._works_in_order = self._works_in_order or result.verdict == "match"
        counts = self._works_in_order and result.reward is not None
        return result.updated(cause=self._ordered_policy.how) if counts else None

    def _makes_prompts(self, recorded: RecordedRow) -> bool:
        agents = self._stack.agents
        info = agents.get(recorded.agent or "") or next(iter(agents.values()), None)
        return info is not None and info.type in known()["own_prompts"]

    async def _replay_once(self, recorded: RecordedRow, policy: Policy) -> RowResult:
        recording = recorded.recording
        result = RowResult(
            recording=recorded.name,
            recorded=recording.reward,
            packaged=recorded.packaged,
            verdict="incomplete",
        )
        if not recording.turns:
            return result.updated(cause="the record keeps nothing that the policy said")
        self.logs.new()  # what was logged before explains nothing about this one
        self._judge.begin(recording.raw)
        self._policy.begin(recording)
        self._unknown = None
        rollout = await self.run(recorded.row, policy, recorded.agent)
        error = rollout.error
        if not rollout.policy_calls and (error is None or error.type == PolicyNeverAskedError.__name__):
            need = missing_in(self.logs.new())
            return result.concluded(need.blocked() if need else Diagnosis("differs", NOT_ASKED))
        judges = any(call.model_server != POLICY for call in rollout.calls)
        result = result.updated(
            reward=rollout.reward,
            status=rollout.status,
            judged_by="endpoint" if judges and self._judge.judged_by is None else self._judge.judged_by,
            error=f"{error.type}: {error.message}"[:1000] if error is not None else "",
            error_kind=error.kind if error is not None else None,
        )
        if self._judge.refused:
            scored = "" if error is not None else "the judge's failure was scored"
            return result.concluded(Diagnosis("blocked", NO_JUDGE, scored, "judge"))
        if error is not None:
            if recorded.agent is not None and recorded.agent not in self._stack.agents:
                result = result.updated(outdated=error.type == UnknownConversationError.__name__)
            return result.concluded(await self._explain(error, recorded))
        return result.concluded(await self._compare(rollout, recording.reward, recorded.row))

    async def _ask_recorded(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._policy(request)
        except UnknownConversationError as error:
            self._unknown = error
            raise

    def policy_for(self, recording: Recording) -> PolicyCallable:
        """A policy that gives a recording's answers from the beginning."""
        policy = OrderedPolicy() if self._works_in_order else RecordedPolicy(self._judge)
        policy.begin(recording)
        return policy

    async def run(
        self,
        row: RowData,
        policy: Policy,
        agent: str | None = None,
        *,
        timeout_s: float | None = None,
        max_calls: int = MAX_CALLS,
    ) -> Rollout:
        """Run a row. Whatever goes wrong is in the rollout."""
        limits = RolloutLimits(timeout_s=timeout_s or self._request.limits.timeout_s, max_calls=max_calls)
        # An agent that the release no longer has would be refused; the default one plays its row.
        agent = agent if agent in self._stack.agents else None
        row = {key: value for key, value in row.items() if key not in ("agent_ref", ENVIRONMENT_SERVER)}
        try:
            return await self._stack.run(row, policy=policy, agent=agent, limits=limits, record_bodies=True)
        except GymgateError as error:
            failure = RolloutError(kind="data", message=str(error), type=type(error).__name__)
            return Rollout(
                id="", environment=self._environment.name, agent="", status="failed", error=failure
            )

    async def _compare(self, rollout: Rollout, recorded: float | None, row: RowData) -> Diagnosis:
        """Compare the reward. If it differs, look for a need that the environment scored as a wrong answer."""
        diagnosis = compare_reward(rollout, recorded)
        if diagnosis.verdict != "differs":
            return diagnosis
        need = await self.logs.need() or missing_in(verification(rollout, row))
        return need.blocked(", and that was scored") if need else diagnosis

    async def _explain(self, error: RolloutError, recorded: RecordedRow) -> Diagnosis:
        """Why a rollout failed."""
        if error.type == UnknownConversationError.__name__:
            return self._explain_unknown(recorded)
        lacking = missing_fields(error.message)
        if error.kind == "data" or lacking:
            whose = (
                "the packaged row" if recorded.packaged else "no packaged row was recorded, and the record"
            )
            return Diagnosis(
                "incomplete", f"{whose} lacks {', '.join(lacking) or 'what the verifier requires'}"
            )
        if need := missing_in(error.message) or await self.logs.need():
            return need.diagnosis
        if error.kind == "timeout" and (kinds := self._config.need_kinds):
            timeout = f"time: no result within {self._request.limits.timeout_s:g} s"
            return Diagnosis(
                "blocked", f"{timeout} (needs read from its files: {', '.join(kinds)})", "", "time"
            )
        return Diagnosis("failed")

    def _explain_unknown(self, recorded: RecordedRow) -> Diagnosis:
        """Why the policy was asked something that the record does not hold."""
        if recorded.agent is not None and recorded.agent not in self._stack.agents:
            return Diagnosis("incomplete", f"its agent {recorded.agent!r} no longer exists")
        if self._makes_prompts(recorded):
            return Diagnosis("differs", "its agent makes prompts that are not recorded")
        if self._unknown is not None and self._unknown.alike == 0:
            return Diagnosis("blocked", NO_JUDGE, "the policy's own model is the judge", "judge")
        return Diagnosis("differs", "the environment said something else than recorded")


def compare_reward(rollout: Rollout, recorded: float | None) -> Diagnosis:
    """The verdict on a rollout without an error."""
    if rollout.reward is None:
        return Diagnosis("incomplete", f"the agent's answer has no reward ({rollout.status})")
    if recorded is None:
        return Diagnosis("incomplete", "the record has no reward")
    return Diagnosis("match" if same_reward(rollout.reward, recorded) else "differs")


def verification(rollout: Rollout, row: Mapping[str, Any]) -> str:
    """The environment's own fields in a result, as JSON: without those of the row and the policy's answer."""
    result = rollout.result or {}
    others = {"response", "responses_create_params", "generation", *row}
    return codec.dumps({name: value for name, value in result.items() if name not in others}).decode()
