"""Findings that a reader of a record should notice, and the thresholds that a user can set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeVar

from gymgate.core.config import Config
from gymgate.quality.known import known
from gymgate.quality.model import CheckResult, Thresholds
from gymgate.quality.sections import (
    ANSWERS,
    ANY_WRONG,
    CASES,
    NO_REWARD,
    PROBE_TEXTS,
    Case,
    FlaggedRow,
    ProbeKind,
    ProbeName,
    ProbeRewards,
    Probes,
)

CASE_TEXTS: dict[Case, str] = {
    "judge_down": "its judge does not answer",
    "tool_timeout": "a tool call is not answered",
    "cut_off": "the policy's answer is cut off",
    "long_answer": "the answer has a quarter of a million characters",
}

_SHOWN = 5
"""Rows, or groups of rows, that a finding lists."""


FindingKind = Literal[
    "reward differs", "reward changes", "no reward", "free reward", "failure scored", "right answer rejected",
    "wrong answer accepted", "answer suspect", "duplicates", "answer in prompt", "row in two splits",
]  # fmt: skip


SUSPICIONS: frozenset[FindingKind] = frozenset({
    "free reward", "right answer rejected", "wrong answer accepted", "answer suspect",
})  # fmt: skip
"""Kinds that probes flag. Only the grader's code tells whether such a reward is wrong."""


class Dismissal(Config):
    """Flags that the grader's code does not bear out: an error of the probe."""

    environments: tuple[str, ...]
    """`KIND/NAME` of each."""
    nemo_gym: str
    """Release."""
    probes: tuple[ProbeName, ...]
    """Probes that flagged it."""
    reason: str
    """Why the flag says nothing."""

    def is_about(self, environment: str, release: str) -> bool:
        """Whether it is about this `KIND/NAME` in this release."""
        return environment in self.environments and release == self.nemo_gym


class Quote(Config):
    """A sentence of the release's authors."""

    file: str
    """Path below the packages of the release."""
    line: int
    text: str


class Proof(Dismissal):
    """What was read in the grader's code that makes a flag a finding."""

    file: str
    """Path below the packages of the release."""
    line: int
    reason: str = ""
    """What the code does; stated only with counter-witnesses."""
    counter: tuple[FlaggedRow, ...] = ()
    """Answers to rows of the first environment that would not earn `expected` if the reason were false."""
    documented: Quote | None = None
    """Where the authors say that it is meant."""

    @property
    def place(self) -> str:
        """Where it is, and the reason if there is one: `mcqa/app.py:82: reads ...`."""
        return f"{self.file}:{self.line}{f': {self.reason}' if self.reason else ''}"


@cache
def proofs() -> tuple[Proof, ...]:
    """Return the proofs that ship with gymgate."""
    return tuple(Proof.model_validate(proof) for proof in known()["proofs"])


@cache
def dismissals() -> tuple[Dismissal, ...]:
    """Return the dismissals that ship with gymgate."""
    return tuple(Dismissal.model_validate(dismissal) for dismissal in known()["dismissals"])


Judgement = TypeVar("Judgement", bound=Dismissal)


def _by_probe(judgements: Iterable[Judgement], record: CheckResult) -> dict[ProbeName, Judgement]:
    """Return the judgements on a record's flags."""
    return {
        probe: judgement
        for judgement in judgements
        if judgement.is_about(f"{record.kind}/{record.environment}", record.nemo_gym)
        for probe in judgement.probes
    }


class Finding(NamedTuple):
    """A possible problem: something that was measured, or a probe's flag."""

    kind: FindingKind
    text: str
    """One sentence."""
    probe: ProbeName | None = None
    """The probe that flagged it."""
    proof: Proof | None = None
    """For a flag: what the grader's code says; `None` if it was not read, or pays on purpose."""
    probe_kind: ProbeKind | None = None
    """For a flag: what it means for a policy."""
    witness: FlaggedRow | None = None
    """For a flag: the first row that shows it; `None` if the record has none."""

    def __str__(self) -> str:
        return self.text

    @property
    def of_rows(self) -> bool:
        """Whether the rows alone show it."""
        return self.kind in ("duplicates", "answer in prompt", "row in two splits")

    @property
    def label(self) -> str:
        """What it is, in a few words: `suspicion (negated)`, or its kind and where the grader's code shows it."""
        if (proof := self.proof) is not None:
            quote = proof.documented
            documented = f"; documented: {quote.file}:{quote.line}" if quote else ""
            return f"{self.probe_kind} ({self.probe}; {proof.place}{documented})"
        return f"suspicion ({self.probe})" if self.is_suspicion else self.kind

    @property
    def is_suspicion(self) -> bool:
        """Whether it is a flag without a proof."""
        return self.kind in SUSPICIONS and self.proof is None


def findings(record: CheckResult) -> Iterator[Finding]:
    """Yield what was measured, and the flags of which the grader's code was read."""
    return (finding for finding in problems(record) if not finding.is_suspicion)


def suspicions(record: CheckResult) -> Iterator[Finding]:
    """Yield the flags of which the grader's code was not read."""
    return (finding for finding in problems(record) if finding.is_suspicion)


def problems(record: CheckResult) -> Iterator[Finding]:
    """Yield every possible problem but dismissed flags."""
    proven, dismissed = _by_probe(proofs(), record), _by_probe(dismissals(), record)
    for problem in _flags_and_facts(record):
        if problem.probe is None:
            yield problem
        elif problem.probe not in dismissed:
            yield problem._replace(proof=proven.get(problem.probe))


def _flags_and_facts(record: CheckResult) -> Iterator[Finding]:
    if record.verdict == "differs":
        again = f"{record.matched} of {record.compared}"
        yield Finding("reward differs", f"{again} recorded rewards are reproduced: {record.detail}")
    yield from changed_rewards(record)
    yield from free_rewards(record)
    yield from missing_rewards(record)
    yield from scored_failures(record)
    yield from oracle_findings(record)
    yield from flagged_probes(record)
    yield from row_findings(record)


def changed_rewards(record: CheckResult) -> Iterator[Finding]:
    """Rewards that change, or that do not come at all."""
    if (again := record.deterministic) is None:
        return
    if changed := again.changed:
        rewards = ", ".join(f"{reward:g}" for reward in changed[0].rewards)
        count = f"{len(changed)} of {again.rollouts} rollouts"
        text = f"scored again, {count} get another reward; {changed[0].rollout}: {rewards}"
        yield Finding("reward changes", text)
    if again.failed and again.scored:
        text = f"scored again, {again.failed} of {again.failed + again.scored} scorings give no reward"
        yield Finding("no reward", text)


def free_rewards(record: CheckResult, limit: float | None = None) -> Iterator[Finding]:
    """Answers that solve nothing and earn more than `limit` on average; without a limit, more than 0 in any row.

    Another row's best answer counts if it earns more than half the recorded mean: less may be chance, such as a letter
    out of four.
    """
    if record.probes is None:
        return
    recorded = record.probes.recorded_mean
    for name, rewards in record.probes.answers.items():
        if name not in ANSWERS:
            continue
        if name == ANSWERS[-1]:
            is_noticed = rewards.mean > max(limit or 0.0, (recorded or 0.0) / 2)
        else:
            is_noticed = rewards.highest > 0 if limit is None else rewards.mean > limit
        if is_noticed:
            count = f"above 0 in {rewards.above_zero} of {rewards.rows} rows"
            yield _flag("free reward", name, f"earns {count}", record.probes)


def _flag(kind: FindingKind, probe: ProbeName, earns: str, probes: Probes) -> Finding:
    """Return a probe's flag, with its first witness, and for exploitable ones the means."""
    rewards, (subject, probe_kind) = probes.answers[probe], PROBE_TEXTS[probe]
    if any(flag.options_shown for flag in rewards.flagged):
        probe_kind = "exploitable"
    text, witness = f"{subject} {earns}", next(iter(rewards.flagged), None)
    if probe_kind == "exploitable":
        recorded = "" if probes.recorded_mean is None else f", recorded answers {probes.recorded_mean:.3g}"
        text += f", {rewards.mean:.3g} on average{recorded}"
    text += "" if witness is None else f"; {witness}"
    return Finding(kind, text, probe, None, probe_kind, witness)


def _unmeasured_answers(probes: Probes) -> str:
    """Return the answers of which rows gave no reward, and why; empty if there are none."""
    reasons: dict[str, list[str]] = {}
    for name in ANSWERS:
        rewards, reason = probes.answers.get(name), probes.missing.get(name)
        if rewards is not None and rewards.failed:
            reason = f"no reward in {rewards.failed} of {rewards.rows + rewards.failed} rows"
        elif name == ANSWERS[-1]:  # it needs two recorded rows, which not every environment has
            reason = None
        if reason:
            reasons.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())


def missing_rewards(record: CheckResult) -> Iterator[Finding]:
    """Answers that solve nothing and get no reward at all, where a reward of 0 would be right."""
    if names := [name for name in ANSWERS[:-1] if _is_unrewarded(record, name)]:
        text = f"no reward, not even 0, for {' and '.join(PROBE_TEXTS[name][0] for name in names)}"
        yield Finding("no reward", text)


def _is_unrewarded(record: CheckResult, answer: str) -> bool:
    return record.probes is not None and record.probes.missing.get(answer) == NO_REWARD


def solvable(record: CheckResult) -> tuple[int, int] | None:
    """Return how many rows can be solved, at least, and of how many: the right answer or a recorded one solves them.

    `None`: no row was shown to be solvable. A dismissed flag counts for nothing.
    """
    if (oracle := record.oracle) is None:
        return None
    solved = len(oracle.recorded) + oracle.solved * is_tried(record)
    return (solved, oracle.rows) if solved else None


def is_tried(record: CheckResult) -> bool:
    """Whether what its right answers earn says something."""
    return record.oracle is not None and "right answer" not in _by_probe(dismissals(), record)


def right_answer(record: CheckResult) -> str:
    """Return what is known of the right answer, in one line; empty if that is nothing."""
    told = [str(record.oracle)] if is_tried(record) else []
    told += ["at least {} of {} rows are solvable".format(*shown)] if (shown := solvable(record)) else []
    return "; ".join(told)


def scored_failures(record: CheckResult) -> Iterator[Finding]:
    """Cases of failure that give a reward like any other, and answers that the environment cannot bear."""
    for name in CASES:
        case = record.failures.cases.get(name) if record.failures else None
        if case is None:
            continue
        total = sum(case.outcomes.values())
        if name == "long_answer":
            count = case.outcomes.get("error")
            sentence = record.probes.answers.get("fixed sentence") if record.probes else None
            # It begins with the fixed sentence: where that fares alike, the length is not the cause.
            if count and not _is_unrewarded(record, "fixed sentence"):
                text = f"no reward if {CASE_TEXTS[name]}, in {count} of {total} rollouts: {case.said}"
                yield Finding("no reward", text)
            elif max(case.rewards, default=0) > 0 and not (sentence and sentence.above_zero):
                rewards = ", ".join(f"{reward:g}" for reward in case.rewards)
                yield Finding("free reward", f"{CASE_TEXTS[name]}, and earns {rewards}")
        elif count := case.outcomes.get("number"):
            rewards = ", ".join(f"{reward:g}" for reward in case.rewards)
            text = f"a reward ({rewards}) if {CASE_TEXTS[name]}, in {count} of {total} rollouts"
            yield Finding("failure scored", text)


def oracle_findings(record: CheckResult) -> Iterator[Finding]:
    """Right answers that are rejected, and wrong ones that are accepted."""
    oracle = record.oracle
    if oracle is None or oracle.reason is not None:
        return
    if not oracle.solved:
        text = f"no tried phrasing of the right answer ({oracle.field!r}) earns the full reward, in {oracle.rows} rows"
        yield Finding("right answer rejected", text, "right answer")
        return
    if oracle.suspect:
        yield Finding(
            "answer suspect",
            f"the answer of {', '.join(oracle.suspect)} ({oracle.field!r}) earns no full reward in any phrasing, those of "
            f"{oracle.solved} other rows do",
            "right answer",
        )
    rewards = oracle.phrasings.get(oracle.asked_for)
    if rewards is not None and not rewards.full_rows:
        yield Finding(
            "right answer rejected",
            f"the right answer as the prompt asks for it ({oracle.asked_for}) earns no full reward, in {rewards.rows} rows; as "
            f"{oracle.accepted[0]} it does",
            "right answer",
        )


def flagged_probes(record: CheckResult) -> Iterator[Finding]:
    """Yield the probes of which rows did not pay what an honest grader pays."""
    if (probes := record.probes) is None:
        return
    any_wrong = {
        row for name in ANY_WRONG if name in probes.answers for row in _rows_of(probes.answers[name])
    }
    for name, rewards in probes.answers.items():
        if name in ANSWERS or not rewards.flagged:
            continue
        is_strict = PROBE_TEXTS[name][1] == "strict"
        kind: FindingKind = "right answer rejected" if is_strict else "wrong answer accepted"
        is_full = all(flag.reward >= (flag.right or 1.0) for flag in rewards.flagged)
        paid = "the full reward" if is_full else "at least half of the right answer's reward"
        earns = "less than the right answer" if is_strict else paid
        # Rows that pay a wrong answer as much have lost their flag, but count as paid.
        lost = any_wrong - _rows_of(rewards) if rewards.above_zero > len(rewards.flagged) else ()
        least = "at least " if lost and not is_strict and name not in ANY_WRONG else ""
        count = f"earns {earns} in {least}{len(rewards.flagged)} of {rewards.rows} rows"
        yield _flag(kind, name, count, probes)


def _rows_of(rewards: ProbeRewards) -> set[str]:
    return {flag.row for flag in rewards.flagged}


def row_findings(record: CheckResult) -> Iterator[Finding]:
    """Equal rows, prompts that say their answer, and rows in two splits."""
    if (data := record.data) is None:
        return
    if data.duplicates:
        groups = "; ".join(" = ".join(group) for group in data.duplicate_rows[:_SHOWN])
        text = f"{data.duplicates} of {sum(data.files.values())} rows equal an earlier row of their file: {groups}"
        yield Finding("duplicates", text)
    if data.answers_in_prompt:
        names = ", ".join(data.rows_with_answer[:_SHOWN])
        text = f"the prompt says the row's own answer in {data.answers_in_prompt} of {data.answers} rows: {names}"
        yield Finding("answer in prompt", text)
    if data.shared:
        groups = "; ".join(" = ".join(group) for group in data.shared_rows[:_SHOWN])
        yield Finding("row in two splits", f"rows in several splits: {data.shared}: {groups}")


def unmet_thresholds(
    record: CheckResult, thresholds: Thresholds, of_probes: Sequence[str] = ("oracle", "probes")
) -> Iterator[str]:
    """Every threshold that the record does not meet. What could not be measured meets none.

    `of_probes`: the sections that the probes that were run belong to.
    """
    again, probes, failures, oracle = record.deterministic, record.probes, record.failures, record.oracle

    def lacking(option: str, section: str, reason: str = "") -> Iterator[str]:
        """Why a section has no figure; nothing if it has."""
        if getattr(record, section) is None:
            reason = record.missing.get(section, record.missing.get("all", "")) or reason
        if reason or getattr(record, section) is None:
            yield f"{option}: not measured: {reason}"

    is_late = any(row.first is not None for row in record.rows)
    if thresholds.reproducible and (record.verdict != "match" or is_late):
        yield f"--reproducible: {record.verdict}: {record.detail}"
    if thresholds.deterministic:
        is_unscored = again is not None and not again.scored
        yield from lacking("--deterministic", "deterministic", "no scoring gives a reward" * is_unscored)
        yield from (f"--deterministic: {finding}" for finding in changed_rewards(record))
    if (limit := thresholds.max_constant_reward) is not None:
        yield from lacking("--max-constant-reward", "probes", _unmeasured_answers(probes) if probes else "")
        yield from (f"--max-constant-reward {limit:g}: {finding}" for finding in free_rewards(record, limit))
    if thresholds.honest:
        if failures is not None and not failures.cases:
            yield f"--honest: not measured: {next(iter(failures.missing.values()), '')}"
        yield from lacking("--honest", "failures")
        yield from (f"--honest: {finding}" for finding in scored_failures(record))
    if (low := thresholds.min_oracle_reward) is not None:
        why = (oracle.reason or oracle.missing.get("reward", "")) if oracle else ""
        yield from lacking("--min-oracle-reward", "oracle", why)
        if oracle is not None and not why and oracle.reward is not None and oracle.reward < low:
            rows = ", ".join(oracle.unsolved)
            yield f"--min-oracle-reward {low:g}: the right answer earns {oracle.reward:.3g} on average; not full: {rows}"
    if thresholds.no_flags:
        for name in of_probes:
            yield from lacking(
                "--no-flags", name, (oracle.reason or "") if oracle and name == "oracle" else ""
            )
        yield from (
            f"--no-flags: {problem}" for problem in (*oracle_findings(record), *flagged_probes(record))
        )
    if thresholds.clean_rows:
        yield from lacking("--clean-rows", "data", "" if record.data else "its rows were not read")
        yield from (f"--clean-rows: {finding}" for finding in row_findings(record))
