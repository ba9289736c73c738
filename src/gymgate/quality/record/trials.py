"""Trials: rows are run with their right answer in several phrasings, then with the answers of the probes."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gateway.replay.conversation import blocks_of
from gymgate.quality.model import same_reward
from gymgate.quality.record.context import MeasurementContext, ReplayCase, Unmeasured, constant_policy
from gymgate.quality.record.findings import proofs
from gymgate.quality.record.phrasings import PHRASINGS, Phrasing, given_in, policy_of, texts_of
from gymgate.quality.record.probes import PROBES, Probe, Said, Subject, prompt_of, wrong_answers
from gymgate.quality.record.scoring import Scorer
from gymgate.quality.recordings import RecordedRow, RowData
from gymgate.quality.reward_trial import cohort_size
from gymgate.quality.sections import (
    ANSWERS,
    ANY_WRONG,
    PROBE_TEXTS,
    FlaggedRow,
    Oracle,
    OracleReason,
    PhrasingRewards,
    ProbeName,
    ProbeRewards,
    Probes,
)
from gymgate.rollouts.answers import NESTED_FIELDS, answer_of

ROWS = 10
SOLVED_ROWS = 5
"""Rows whose right answer earns the full reward that answers are made of."""
REPEATS = 3
"""Times that the best answer of a row is scored again."""
SHOWN = 600
_PROGRAMS = frozenset({
    "patch", "test_patch", "unit_tests", "tests", "test", "test_cases", "sub_steps", "sql", "gt_sql", "gold_sql",
    "formal_statement", "entry_point", "code_template", "schema_str",
})  # fmt: skip
"""Fields of rows whose answer is a program, a patch or a document that the environment runs or parses."""
_JUDGED = frozenset({"rubric", "criteria", "baseline_answer", "reference_response", "reference_solution"})


async def measure_right_answers(context: MeasurementContext) -> Oracle:
    """Measure what right answers earn; keep it in the context for the probes, with the rows that were tried."""
    context.oracle, context.trials = await _right_answers(context)
    return context.oracle


async def _right_answers(context: MeasurementContext) -> tuple[Oracle, list[Subject]]:
    """Return what up to `ROWS` rows pay for their right answer, and those of the rows that pay the same again."""
    if cohort_size(context.config) > 1:
        return Oracle(reason="scored against siblings"), []
    tasks = [_task(row) for row in context.rows]
    answered = (
        (n, answer)
        for n, row in enumerate(context.rows)
        if (answer := answer_of(row)) and tasks.index(tasks[n]) == n
    )
    # Own environments can have a hundred thousand rows: to compare each with all before it would take hours.
    answers = [*itertools.islice(answered, ROWS)]
    if not answers:
        return Oracle(reason=_why_unanswered(context)), []
    field = Counter(answer.field for _, answer in answers).most_common(1)[0][0]
    subjects = [Subject(ReplayCase(f"row {n}", context.rows[n], _empty)) for n, _ in answers]
    scorer, usual = Scorer(context), _usual(context, subjects)
    await asyncio.gather(
        *(_score_new(scorer, subject, (*subject.requested, *usual, *PHRASINGS)) for subject in subjects)
    )
    if not scorer.counted:
        if scorer.judge_problem:
            return Oracle(reason="needs a judge", field=field), []
        return Oracle(reason="other", detail=scorer.first_error[:300], field=field), []

    await _score_best_again(scorer, subjects)
    steady = [subject for subject in subjects if subject.is_steady]
    unsteady = [subject for subject in subjects if not subject.is_steady]
    if 4 * len(unsteady) > len(subjects):
        rewards = ", ".join(f"{reward:g}" for reward in (unsteady[0].best or 0.0, *unsteady[0].repeats))
        return Oracle(reason="rewards change", detail=f"{unsteady[0].name}: {rewards}", field=field), []

    full = max([1.0, *(row.recording.reward or 0.0 for row in context.recorded)])
    rewarded = (pair for subject in steady for pair in subject.rewards.items())
    accepted = list(dict.fromkeys(phrasing for phrasing, reward in rewarded if reward >= full))
    # A phrasing that one row's prompt asked for, and that is accepted there, was not tried in the other rows.
    await asyncio.gather(*(_score_new(scorer, subject, accepted) for subject in steady))
    asked_for = _most_requested(steady, accepted)
    scored = {phrasing.name for subject in steady for phrasing in subject.rewards}
    if asked_for not in ("", *scored) and not any(subject.is_solved(full) for subject in steady):
        return Oracle(reason="other", detail=scorer.first_error[:300], field=field), steady
    solved = [row.row for row in context.recorded if (row.recording.reward or 0.0) >= full]
    oracle = _summary(steady, full, field, asked_for, solved)
    if unsteady:
        oracle.missing["rows"] = f"rewards change for {', '.join(subject.name for subject in unsteady)}"
    return oracle, steady


async def _score_new(scorer: Scorer, subject: Subject, phrasings: Iterable[Phrasing]) -> None:
    """Score a row's right answer in those of the phrasings that it can have and has no reward for."""
    untried = [
        phrasing
        for phrasing in dict.fromkeys(phrasings)
        if phrasing.form in subject.forms and phrasing not in subject.rewards
    ]
    rewards = await asyncio.gather(*(_score(scorer, subject, phrasing) for phrasing in untried))
    for phrasing, reward in zip(untried, rewards, strict=True):
        if reward is not None:
            subject.rewards[phrasing] = reward


def _usual(context: MeasurementContext, subjects: Iterable[Subject]) -> tuple[Phrasing, ...]:
    """The phrasings in which the environment's prompts and recordings give answers, those of the prompts first."""
    requested = [phrasing for subject in subjects for phrasing in subject.requested]
    bare = tuple(phrasing for phrasing in PHRASINGS if not phrasing.before)
    recorded = [phrasing for row in context.recorded for phrasing in given_in(last_message(row)) or bare]
    return tuple(dict.fromkeys([*requested, *recorded]))


def _in_each_phrasing(subject: Subject, usual: Sequence[Phrasing], full: float) -> list[Subject]:
    """The row once for each usual phrasing that earns the full reward; if none does, for another that does."""
    paid = [phrasing for phrasing, reward in subject.rewards.items() if reward >= full]
    said = [phrasing for phrasing in paid if phrasing in usual] or paid[:1]
    return [replace(subject, phrasing=phrasing) for phrasing in said]


async def _score_best_again(scorer: Scorer, subjects: Iterable[Subject]) -> None:
    """Score each row's answer in its best phrasing `REPEATS` times more, all rows at once."""
    best = [
        (subject, max(subject.rewards, key=subject.rewards.__getitem__))
        for subject in subjects
        if subject.rewards
    ]
    for _ in range(REPEATS):
        rewards = await asyncio.gather(*(_score(scorer, subject, phrasing) for subject, phrasing in best))
        for (subject, _), reward in zip(best, rewards, strict=True):
            if reward is not None:
                subject.repeats.append(reward)


async def _score(scorer: Scorer, subject: Subject, phrasing: Phrasing) -> float | None:
    return await scorer.score(subject.case, policy_of(phrasing, subject.forms))


def _summary(
    subjects: Sequence[Subject], full: float, field: str, asked_for: str, solved: Sequence[RowData]
) -> Oracle:
    """Return what the rows paid: in all, and by phrasing. `solved`: rows that a recorded answer solved."""
    unscored = [subject.name for subject in subjects if subject.best is None]
    unsolved = {subject.name: subject for subject in subjects if not subject.is_solved(full)}
    phrasings = dict.fromkeys(phrasing for subject in subjects for phrasing in subject.rewards)
    return Oracle(
        field=field,
        asked_for=asked_for,
        rows=len(subjects),
        solved=len(subjects) - len(unsolved),
        full=full,
        reward=statistics.fmean(subject.best for subject in subjects if subject.best is not None),
        phrasings={
            phrasing.name: _count(
                [subject.rewards[phrasing] for subject in subjects if phrasing in subject.rewards], full
            )
            for phrasing in phrasings
        },
        unsolved=tuple(unsolved),
        recorded=tuple(name for name, subject in unsolved.items() if subject.row in solved),
        suspect=tuple(subject.name for subject in _suspect(subjects, full)),
        missing={"reward": f"no reward in any phrasing for {', '.join(unscored)}"} if unscored else {},
    )


def _suspect(subjects: Sequence[Subject], full: float) -> list[Subject]:
    """Return the unsolved rows, fewer than half, that ask for the same as a solved one."""
    solved = {subject.requested for subject in subjects if subject.is_solved(full)}
    unsolved = [subject for subject in subjects if not subject.is_solved(full)]
    return [
        subject for subject in unsolved if subject.requested in solved and 2 * len(unsolved) < len(subjects)
    ]


def _most_requested(subjects: Sequence[Subject], accepted: Sequence[Phrasing]) -> str:
    """Return the phrasing that most prompts ask for; of its forms the accepted one, else the first."""
    sayable = [
        [phrasing for phrasing in subject.requested if phrasing.form in subject.forms] for subject in subjects
    ]
    chosen = [
        next((phrasing for phrasing in row if phrasing in accepted), row[0]).name for row in sayable if row
    ]
    return Counter(chosen).most_common(1)[0][0] if chosen else ""


def _count(rewards: Sequence[float], full: float) -> PhrasingRewards:
    return PhrasingRewards(
        rows=len(rewards),
        full_rows=sum(reward >= full for reward in rewards),
        partial_rows=sum(0 < reward < full for reward in rewards),
        zero_rows=sum(reward <= 0 for reward in rewards),
        mean=statistics.fmean(rewards),
    )


def _fields(row: RowData) -> set[str]:
    """The names of its fields, nested ones included."""
    return {name for part in (row, *map(row.get, NESTED_FIELDS)) if isinstance(part, dict) for name in part}


def _why_unanswered(context: MeasurementContext) -> OracleReason:
    fields = {name for row in context.rows[:1] for name in _fields(row)}
    if fields & _PROGRAMS:
        return "answer is a program or patch"
    return "needs a judge" if fields & _JUDGED or context.config.judges else "no answer in the rows"


async def measure(context: MeasurementContext) -> Probes:
    """Give every probe's answers to up to `ROWS` rows, or up to `SOLVED_ROWS` with a right answer.

    A flagged answer is scored once more. What else a row pays says nothing if it pays a wrong answer, or a made-up one.
    """
    context.refuse_cohorts()
    names = context.request.probes
    selected = [probe for probe in PROBES if not names or probe.name in names]
    asking = [
        Subject(ReplayCase(f"row {n}", row, _empty))
        for n, row in enumerate(context.rows)
        if _fields(row) & _PROGRAMS and answer_of(row) is None
    ]
    subjects = {"row": list(_rows(context)), "program": asking[:ROWS], "solved row": list[Subject]()}
    why = {"row": "it has no rows", "program": "no row asks for a program", "solved row": ""}
    if not subjects["row"]:
        raise Unmeasured(why["row"])
    if any(probe.of == "solved row" for probe in selected):
        measured = context.oracle or await measure_right_answers(context)
        solved = [subject for subject in context.trials if subject.is_solved(measured.full)][:SOLVED_ROWS]
        usual = _usual(context, context.trials)
        said = [phrased for subject in solved for phrased in _in_each_phrasing(subject, usual, measured.full)]
        for subject in said:
            await _prepare(context, subject, measured.full)
        subjects["solved row"] = said
        why["solved row"] = str(measured.reason or "no right answer earns the full reward")
    full = context.oracle.full if context.oracle else 1.0
    answers: dict[ProbeName, ProbeRewards] = {}
    missing: dict[str, str] = {}
    for probe in selected:
        outcome = await _probe(context, probe, subjects[probe.of], full)
        if isinstance(outcome, ProbeRewards):
            counter = await _counter_witnesses(context, probe.name) if names else ()
            answers[probe.name] = outcome.model_copy(update={"counter": counter})
        else:
            missing[probe.name] = outcome or why[probe.of]
    recorded = [row.recording.reward for row in context.recorded if row.recording.reward is not None]
    return Probes(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        recorded_mean=statistics.fmean(recorded) if recorded else None,
        answers=without_echoes(answers),
        missing=missing,
    )


def without_echoes(answers: Mapping[ProbeName, ProbeRewards]) -> dict[ProbeName, ProbeRewards]:
    """Leave out flags of rows that pay a wrong or made-up answer as much: they say nothing more."""
    any_wrong = [flag for name in ANY_WRONG if name in answers for flag in answers[name].flagged]
    paid = {flag.row: flag.reward for flag in sorted(any_wrong, key=lambda flag: flag.reward)}
    left: dict[ProbeName, ProbeRewards] = {}
    for name, rewards in answers.items():
        is_kept = name in (*ANY_WRONG, *ANSWERS) or PROBE_TEXTS[name][1] == "strict"
        flags = [flag for flag in rewards.flagged if is_kept or flag.reward > paid.get(flag.row, -math.inf)]
        left[name] = rewards.model_copy(update={"flagged": tuple(flags)})
    return left


async def _probe(
    context: MeasurementContext, probe: Probe, subjects: Sequence[Subject], full: float
) -> ProbeRewards | str:
    """The rewards of one probe; why there are none, empty if it makes no answer of these rows."""
    scorer = Scorer(context)
    pairs = [(subject, answers) for subject in subjects if (answers := probe.answers(subject))]
    if not pairs:
        return "its rows have no such answer" if subjects else ""

    async def score(subject: Subject, answers: Sequence[Said]) -> list[float | None]:
        return await asyncio.gather(
            *(scorer.score(subject.case, subject.policy(answer)) for answer in answers)
        )

    by_row = await asyncio.gather(*(score(*pair) for pair in pairs))
    counted = [reward for rewards in by_row for reward in rewards if reward is not None]
    if not counted:
        return scorer.problem
    flagged: dict[str, FlaggedRow] = {}
    for (subject, answers), rewards in zip(pairs, by_row, strict=True):
        numbers = [reward for reward in rewards if reward is not None]
        is_strict = PROBE_TEXTS[probe.name][1] == "strict"
        least = full if is_strict else (subject.best or full) / 2
        is_flag = len(numbers) == len(rewards) and all((reward < least) == is_strict for reward in numbers)
        if probe.of == "row":
            is_flag = bool(numbers) and numbers[0] > 0
        elif is_flag:
            again = await score(subject, answers)
            is_flag = all(
                two is not None and same_reward(one, two) for one, two in zip(numbers, again, strict=True)
            )
        if is_flag:
            said = answers[0] if isinstance(answers[0], str) else _described(probe, answers[0])
            flagged.setdefault(
                subject.name,
                FlaggedRow(
                    row=subject.name,
                    answer=said if len(said) <= SHOWN else f"{said[:SHOWN]}…",
                    reward=numbers[0],
                    right=subject.best,
                    recorded=subject.case.origin and subject.case.origin.recording.reward,
                    options_shown=probe.name.startswith("every option") and subject.shows_options,
                ),
            )
    if scorer.judge_problem and (PROBE_TEXTS[probe.name][1] == "exploitable" or not flagged):
        return scorer.judge_problem  # a mean over what is paid without a judge would be too high
    scored: dict[str, list[float]] = {subject.name: [] for subject, _ in pairs}
    for (subject, _), rewards in zip(pairs, by_row, strict=True):
        scored[subject.name] += [reward for reward in rewards if reward is not None]
    by_name = [rewards for rewards in scored.values() if rewards]
    return ProbeRewards(
        rows=len(by_name),
        failed=len(scored) - len(by_name),
        mean=statistics.fmean(map(statistics.fmean, by_name)),
        highest=max(counted),
        above_zero=sum(max(rewards) > 0 for rewards in by_name),
        flagged=tuple(flagged.values()),
    )


async def _counter_witnesses(context: MeasurementContext, probe: ProbeName) -> tuple[FlaggedRow, ...]:
    """Give the answers that test the published reason of a probe's flags."""
    about, scorer = (context.environment.known_as, context.request.stack.runtime.version), Scorer(context)
    read = [proof for proof in proofs() if about == (proof.environments[0], proof.nemo_gym)]
    tried = []
    for witness in (witness for proof in read if probe in proof.probes for witness in proof.counter):
        case = ReplayCase(witness.row, context.rows[int(witness.row.split()[1])], _empty)
        if (reward := await scorer.score(case, constant_policy(witness.answer))) is not None:
            tried.append(witness.model_copy(update={"reward": reward}))
    return tuple(tried)


def _described(probe: Probe, answer: Said) -> str:
    if isinstance(answer, tuple):
        return "; ".join(f"{call['name']}({call['arguments']})" for call in answer)
    return PROBE_TEXTS[probe.name][0]


def _rows(context: MeasurementContext) -> Iterator[Subject]:
    """The recorded rows, each once, then packaged ones: up to `ROWS`.

    A recorded row that lacks what scoring needs is left out: without a reward it would say nothing of the environment.
    """
    seen: list[Any] = []
    verdicts = (result.verdict for result in context.results)
    recorded = [
        context.replay_of(row)
        for row, verdict in itertools.zip_longest(context.recorded, verdicts)
        if verdict != "incomplete" and row.recording.turns
    ]
    packaged = [ReplayCase(f"row {number}", row, _empty) for number, row in enumerate(context.rows)]
    for case in (*recorded, *packaged):
        task = _task(case.row)
        if task not in seen and len(seen) < ROWS:
            seen.append(task)
            yield Subject(case, _best_answer(case.row, context.recorded))


def _task(row: Any) -> Any:
    """What two rows have in common that differ by the agent they are for: they count once."""
    return {name: value for name, value in row.items() if name != "agent_ref"}


def _empty() -> PolicyCallable:
    return constant_policy("")


def _best_answer(row: Any, recorded: Sequence[RecordedRow]) -> str:
    """The best recorded answer to another prompt."""
    prompt = prompt_of(row["responses_create_params"])
    others = [
        (other.recording.reward or 0.0, text)
        for other in recorded
        if (other.recording.reward or 0) > 0
        and prompt_of(other.row["responses_create_params"]) != prompt
        and (text := last_message(other))
    ]
    return max(others, key=lambda pair: pair[0])[1] if others else ""


async def _prepare(context: MeasurementContext, subject: Subject, full: float) -> None:
    """Give a solved row the answer of another row, and wrong answers: of the same kind, else of other rows.

    Another row's answer may be an equal one in other words. It is left out if that row pays the right answer of this one.
    """
    form, said = "calls" if subject.calls else subject.phrasing.form, texts_of(subject.forms)

    def is_other(texts: frozenset[str]) -> bool:
        """Calls of several rows have arguments in common; an answer that another row's list holds too may be right here."""
        return said.isdisjoint(texts) if subject.right else not (said <= texts or texts <= said)

    others = {
        str(other.forms[form]): other
        for other in context.trials
        if other.forms.get(form) and is_other(texts_of(other.forms))
    }
    if not subject.right:
        subject.other = next((other.forms[form] for other in others.values() if subject.calls), "")
        return
    scorer = Scorer(context)
    policy = constant_policy(subject.say(subject.right))
    wrong: list[str] = []
    for other in itertools.islice(others.values(), SOLVED_ROWS):
        reward = await scorer.score(other.case, policy)
        if len(wrong) < 2 and reward is not None and reward < full:
            wrong.append(str(other.forms["answer" if form == "JSON" else form]))
    subject.wrong = wrong_answers(subject.row, subject.right, form) or tuple(wrong)
    subject.other = wrong[0] if wrong else ""


def last_message(recorded: RecordedRow) -> str:
    """The text of the policy's last message; empty if it has none."""
    items = [item for turn in recorded.recording.turns for item in turn]
    texts = [
        block.text
        for item in items
        if item.get("type", "message") == "message"
        for block in blocks_of([item])
    ]
    return texts[-1] if texts else ""
