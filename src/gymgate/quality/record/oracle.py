"""Oracle: does the right answer, as the rows hold it, get the reward? And in which phrasing?"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gateway.replay.conversation import blocks_of, items_of
from gymgate.quality.model import same_reward
from gymgate.quality.record.context import MeasurementContext, ReplayCase, constant_policy, respond
from gymgate.quality.record.schema import Oracle, OracleReason, PhrasingRewards
from gymgate.quality.record.scoring import Scorer
from gymgate.quality.recordings import RowData
from gymgate.quality.reward_trial import cohort_size
from gymgate.rollouts.answers import DONE, NESTED_FIELDS, Calls, answer_of, calls_in

ROWS = 10
REPEATS = 3
"""Times that the best answer of a row is scored again."""
MADE_UP = "zqxv kwyj"
"""An answer that is right nowhere."""
_PROGRAMS = frozenset({
    "patch", "test_patch", "unit_tests", "tests", "test", "test_cases", "sub_steps", "sql", "gt_sql", "gold_sql",
    "formal_statement", "entry_point", "code_template", "schema_str",
})  # fmt: skip
"""Fields of rows whose answer is a program, a patch or a document that the environment runs or parses."""
_JUDGED = frozenset({"rubric", "criteria", "baseline_answer", "reference_response", "reference_solution"})

Answer = str | Calls


class Phrasing(NamedTuple):
    """How an answer is said."""

    before: str
    form: str
    """The form of the answer: see `forms_of`."""
    after: str

    @property
    def name(self) -> str:
        return f"{self.before}{self.form}{self.after}"


PHRASINGS = (
    Phrasing("", "answer", ""),
    Phrasing(r"\boxed{", "answer", "}"),
    Phrasing("<answer>", "answer", "</answer>"),
    Phrasing("Answer: ", "answer", ""),
    Phrasing("The final answer is: ", "answer", ""),
    Phrasing("[[", "answer", "]]"),
    Phrasing("((", "answer", "))"),
    Phrasing('{"answer": ', "JSON", "}"),
    Phrasing("", "items", ""),
    Phrasing("", "item", ""),
    Phrasing(r"\boxed{", "item", "}"),
    Phrasing("Final Answer: [", "items", "]"),
    Phrasing("", "grid", ""),
    Phrasing("", "lines", ""),
    Phrasing("", "option", ""),
    Phrasing("", "calls", ""),
    Phrasing("", "calls at once", ""),
)
_ASKED = re.compile(
    r"(?P<boxed>\\boxed\{)"
    r"|<(?P<tag>\w+)>[^<>]{0,40}</(?P=tag)>"
    r'|\{\s*"(?P<key>(?:final_)?answer|response|result|output)":'
    r"|\b(?P<label>(?:Final |Correct )?(?:Answer|Judge?ment|Verdict|Result|Choice)):[ ]?(?P<list>\[)?"
    r"|(?P<parentheses>double parentheses|\(\(\w+\)\))"
)
"""How prompts ask for an answer."""


@dataclass
class RowTrial:
    """A row whose right answer is tried in several phrasings."""

    number: int
    row: RowData
    rewards: dict[Phrasing, float] = field(default_factory=dict)
    """Rewards that count of its own answer."""
    other_rewards: dict[Phrasing, float] = field(default_factory=dict)
    """Rewards that count of another row's answer."""
    repeats: list[float] = field(default_factory=list)
    """Rewards of its own answer in its best phrasing, scored again."""

    @cached_property
    def forms(self) -> Mapping[str, Answer]:
        """See `forms_of`."""
        return forms_of(self.row)

    @cached_property
    def requested(self) -> tuple[Phrasing, ...]:
        """See `asked_for`."""
        return asked_for(self.row)

    @property
    def name(self) -> str:
        return f"row {self.number}"

    @property
    def best(self) -> float | None:
        return max(self.rewards.values(), default=None)

    @property
    def calls_tools(self) -> bool:
        """Whether its answer is calls of tools."""
        return "calls" in self.forms

    @property
    def is_steady(self) -> bool:
        """Whether the same answer got the same reward again."""
        return all(same_reward(reward, self.best or 0.0) for reward in self.repeats)

    def is_solved(self, full: float) -> bool:
        return self.best is not None and self.best >= full

    def first_attempts(self) -> list[Attempt]:
        """Return its answer in the phrasings that its prompt asks for, and in those of the table."""
        return self._attempts(dict.fromkeys((*self.requested, *PHRASINGS)), self.forms, self.rewards)

    def further_attempts(self, phrasings: Iterable[Phrasing]) -> list[Attempt]:
        """Return its answer in phrasings that another row's prompt asks for."""
        untried = [each for each in phrasings if each not in (*self.requested, *PHRASINGS)]
        return self._attempts(untried, self.forms, self.rewards)

    def accepted(self, full: float) -> Phrasing | None:
        """Return the first phrasing that earns the full reward, one that its prompt asks for before others."""
        return next(
            (each for each in (*self.requested, *self.rewards) if self.rewards.get(each, full - 1) >= full),
            None,
        )

    def other(self, trials: Iterable[RowTrial]) -> RowTrial | None:
        """Return the first row whose answer is another one: neither of the two says all that the other says."""
        said = texts_of(self.forms)
        others = ((trial, texts_of(trial.forms)) for trial in trials if trial is not self)
        return next((trial for trial, its in others if not (said <= its or its <= said)), None)

    def wrong_attempts(self, phrasings: Iterable[Phrasing], trials: Sequence[RowTrial]) -> list[Attempt]:
        """Return the answer of another row, in phrasings in which its own can be said, too."""
        other = self.other(trials)
        sayable = [each for each in phrasings if each.form in self.forms]
        return [] if other is None else self._attempts(sayable, other.forms, self.other_rewards)

    def _attempts(
        self, phrasings: Iterable[Phrasing], forms: Mapping[str, Answer], rewards: dict[Phrasing, float]
    ) -> list[Attempt]:
        return [Attempt(self.row, each, forms, rewards) for each in phrasings if each.form in forms]


class Attempt(NamedTuple):
    """An answer to a row in one phrasing."""

    row: RowData
    phrasing: Phrasing
    forms: Mapping[str, Answer]
    rewards: dict[Phrasing, float]
    """Gets the reward, if it counts."""


async def measure(context: MeasurementContext) -> Oracle:
    """Measure what right answers earn, and keep the rows that were tried for the probes."""
    context.oracle, context.trials = await _measure(context)
    return context.oracle


async def _measure(context: MeasurementContext) -> tuple[Oracle, Sequence[RowTrial]]:
    """Run up to `ROWS` rows with their right answer in every phrasing, and with another row's in each accepted one."""
    if cohort_size(context.config) > 1:
        return Oracle(reason="scored against siblings"), ()
    trials = [RowTrial(number, row) for number, row in enumerate(context.rows) if answer_of(row)][:ROWS]
    if not trials:
        return Oracle(reason=_why_unanswered(context)), ()
    fields = Counter(answer.field for trial in trials if (answer := answer_of(trial.row)))
    scorer = Scorer(context)
    runs = _Runs(scorer)
    await runs.all(attempt for trial in trials for attempt in trial.first_attempts())
    await runs.repeat(trials)
    unsteady = [trial for trial in trials if not trial.is_steady]
    if 4 * len(unsteady) > len(trials):
        rewards = ", ".join(f"{reward:g}" for reward in (unsteady[0].best or 0.0, *unsteady[0].repeats))
        detail = f"{unsteady[0].name}: {rewards}"
        return Oracle(reason="rewards change", detail=detail, field=next(iter(fields))), ()
    trials = [trial for trial in trials if trial.is_steady]
    if not scorer.counted:
        reason: OracleReason = "needs a judge" if scorer.judge_problem else "other"
        detail = "" if scorer.judge_problem else scorer.first_error[:300]
        return Oracle(reason=reason, detail=detail, field=next(iter(fields))), ()
    full = max([1.0, *(row.recording.reward or 0.0 for row in context.recorded)])
    rewarded = [(phrasing, reward) for trial in trials for phrasing, reward in trial.rewards.items()]
    accepted = list(dict.fromkeys(phrasing for phrasing, reward in rewarded if reward >= full))
    await runs.all(attempt for trial in trials for attempt in trial.further_attempts(accepted))
    await runs.all(attempt for trial in trials for attempt in trial.wrong_attempts(accepted, trials))
    await runs.drop_equal_answers(trials, full)
    best = [trial.best for trial in trials if trial.best is not None]
    unsolved = [trial for trial in trials if not trial.is_solved(full)]
    others = _by_phrasing((trial.other_rewards for trial in trials), full)
    missing = {} if others or not accepted else {"others": "no other answer of a row was scored"}
    if unscored := [trial.name for trial in trials if trial.best is None]:
        missing["reward"] = f"no reward in any phrasing for {', '.join(unscored)}"
    if unsteady:
        missing["rows"] = f"rewards change for {', '.join(trial.name for trial in unsteady)}"
    oracle = Oracle(
        field=fields.most_common(1)[0][0],
        asked_for=_most_requested(trials, accepted),
        rows=len(trials),
        solved=len(trials) - len(unsolved),
        full=full,
        reward=statistics.fmean(best),
        phrasings=_by_phrasing((trial.rewards for trial in trials), full),
        others=others,
        unsolved=tuple(trial.name for trial in unsolved),
        suspect=tuple(trial.name for trial in _suspect(trials, full)),
        missing=missing,
    )
    return oracle, trials


def _suspect(trials: Sequence[RowTrial], full: float) -> list[RowTrial]:
    """Return the unsolved rows, fewer than half, that ask for the same as a solved one."""
    solved = {trial.requested for trial in trials if trial.is_solved(full)}
    unsolved = [trial for trial in trials if not trial.is_solved(full)]
    return (
        [trial for trial in unsolved if trial.requested in solved] if 2 * len(unsolved) < len(trials) else []
    )


def forms_of(row: RowData) -> Mapping[str, Answer]:
    """The forms in which a row's answer can be said.

    answer: as text; JSON: as a JSON string; items: those of a list, with commas; item: the first of a list of texts; grid:
    its lines, with spaces; lines: the same without spaces; option: the text of the option that it names; calls: one a
    turn, or at once.
    """
    own = answer_of(row)
    assert own is not None
    if calls := calls_in(own.value):
        return {"calls": calls, **({"calls at once": calls} if len(calls) > 1 else {})}
    value = own.value
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError):
            value = codec.loads(value.encode())
    item = value[0] if isinstance(value, list) and value and isinstance(value[0], str) else None
    text = own.value if isinstance(own.value, str) else codec.dumps(value).decode()
    forms: dict[str, Answer] = {"answer": text, "JSON": codec.dumps(text).decode()}
    if isinstance(value, list) and value and all(isinstance(line, list) for line in value):
        grid = "\n".join(" ".join(map(str, line)) for line in value)
        forms |= {"grid": grid, "lines": grid.replace(" ", "")}
    elif isinstance(value, list):
        forms["items"] = ", ".join(map(str, value))
    if item is not None:  # a list may hold the alternatives that are accepted
        forms["item"] = item
    options = row.get("options")
    for option in options if isinstance(options, list) else ():
        if isinstance(option, dict) and text in option:
            forms["option"] = str(option[text])
    return forms


def asked_for(row: RowData) -> tuple[Phrasing, ...]:
    """What the prompt itself asks for, in each form that the answer may have; empty if no pattern finds it.

    A prompt says it last, or in the message of the system.
    """
    prompt = "\n".join(block.text for block in blocks_of(items_of(row["responses_create_params"])))
    matches = [*_ASKED.finditer(prompt)]
    if not matches:
        return ()
    last = matches[-1]
    if last["boxed"]:
        before, after = r"\boxed{", "}"
    elif last["tag"]:
        before, after = f"<{last['tag']}>", f"</{last['tag']}>"
    elif last["key"]:
        return (Phrasing(f'{{"{last["key"]}": ', "JSON", "}"),)
    elif last["label"]:
        before, after = f"{last['label']}: {last['list'] or ''}", "]" if last["list"] else ""
    else:
        before, after = "((", "))"
    forms = ("items",) if last["list"] else ("answer", "option", "grid", "lines", "items", "item")
    return tuple(Phrasing(before, form, after) for form in forms)


def policy_of(phrasing: Phrasing, forms: Mapping[str, Answer]) -> PolicyCallable:
    """A policy that gives the answer in this phrasing."""
    answer = forms[phrasing.form]
    if isinstance(answer, str):
        return constant_policy(f"{phrasing.before}{answer}{phrasing.after}")
    return calling_policy(answer, at_once=phrasing.form == "calls at once")


def calling_policy(calls: Calls, *, at_once: bool = False) -> PolicyCallable:
    """A policy that makes these calls, then says that it is done."""
    turns = iter([list(calls)] if at_once else [[call] for call in calls])

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        return respond(next(turns, [DONE]), request)

    return answer


class _Runs:
    """Runs rows in phrasings."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def all(self, attempts: Iterable[Attempt]) -> None:
        """Run attempts, and keep each reward that counts where its attempt says."""
        listed = list(attempts)
        rewards = await asyncio.gather(*map(self._score, listed))
        for attempt, reward in zip(listed, rewards, strict=True):
            if reward is not None:
                attempt.rewards[attempt.phrasing] = reward

    async def _score(self, attempt: Attempt) -> float | None:
        policy = policy_of(attempt.phrasing, attempt.forms)
        return await self._scorer.score(ReplayCase("oracle", attempt.row, lambda: policy), policy)

    async def repeat(self, trials: Iterable[RowTrial]) -> None:
        """Score the best answer of each row again."""
        scored = [trial for trial in trials if trial.rewards]
        phrasings = [max(trial.rewards, key=lambda each: trial.rewards[each]) for trial in scored]
        for _ in range(REPEATS):
            attempts = [
                Attempt(trial.row, each, trial.forms, {})
                for trial, each in zip(scored, phrasings, strict=True)
            ]
            await self.all(attempts)
            for trial, attempt in zip(scored, attempts, strict=True):
                trial.repeats += attempt.rewards.values()

    async def drop_equal_answers(self, trials: Sequence[RowTrial], full: float) -> None:
        """Forget the rewards of another row's answer that is an equal one in other words.

        It is if each of the two rows pays the answer of the other in full, and not one that is made up.
        """
        for trial in trials:
            other = trial.other(trials)
            for phrasing in [each for each, reward in trial.other_rewards.items() if reward >= full]:
                assert other is not None
                made_up = {phrasing.form: f'"{MADE_UP}"' if phrasing.form == "JSON" else MADE_UP}
                back = Attempt(other.row, phrasing, trial.forms, {})
                nonsense = [] if trial.calls_tools else [Attempt(trial.row, phrasing, made_up, {})]
                await self.all([back, *nonsense])
                pays_nonsense = any(each.rewards.get(phrasing, 0.0) >= full for each in nonsense)
                if back.rewards.get(phrasing, 0.0) >= full and nonsense and not pays_nonsense:
                    del trial.other_rewards[phrasing]


def _fields(row: RowData) -> set[str]:
    """The names of its fields, nested ones included."""
    return {name for each in (row, *map(row.get, NESTED_FIELDS)) if isinstance(each, dict) for name in each}


def has_program(row: RowData) -> bool:
    """Whether the answer to a row is a program, a patch or a document, and no right one is there."""
    return bool(_fields(row) & _PROGRAMS) and answer_of(row) is None


def _why_unanswered(context: MeasurementContext) -> OracleReason:
    fields = {name for row in context.rows[:1] for name in _fields(row)}
    if fields & _PROGRAMS:
        return "answer is a program or patch"
    if fields & _JUDGED or context.config.judges:
        return "needs a judge"
    return "no answer in the rows"


def texts_of(forms: Mapping[str, Answer]) -> frozenset[str]:
    """The texts of an answer: itself, or the values of a JSON object, without which it may be the answer of another row."""
    text = str(next(iter(forms.values())))
    try:
        return frozenset(_texts(codec.loads(text.encode())))
    except ValueError:
        return frozenset(_texts(text))


_LATEX = re.compile(r"\\(?:[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}|(?:text|mathrm|mathbf)\s*\{([^{}]*)\})")


def _texts(value: Any) -> Iterator[str]:
    """The parts of an answer, in one notation: numbers as fractions, the items of a list in any order."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
        return
    text = value if isinstance(value, str) else codec.dumps(value).decode()
    text = _LATEX.sub(lambda match: match[3] or f"{match[1]}/{match[2]}", text).strip(" \n\t$.").casefold()
    for part in (text, text.replace(",", "")):
        with contextlib.suppress(ValueError, ZeroDivisionError):
            yield str(Fraction(part.replace(" ", "")))
            return
    if "," in text:
        for part in text.split(","):
            yield from _texts(part)
    else:
        yield " ".join(text.split())


def _most_requested(trials: Sequence[RowTrial], accepted: Sequence[Phrasing]) -> str:
    """Return the phrasing that most prompts ask for; of its forms the accepted one, else the first."""
    sayable = [[each for each in trial.requested if each.form in trial.forms] for trial in trials]
    chosen = [next((each for each in row if each in accepted), row[0]).name for row in sayable if row]
    return Counter(chosen).most_common(1)[0][0] if chosen else ""


def _by_phrasing(trials: Iterable[Mapping[Phrasing, float]], full: float) -> dict[str, PhrasingRewards]:
    """Count the rows by reward, for the name of each phrasing."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for trial in trials:
        for phrasing, reward in trial.items():
            rewards[phrasing.name].append(reward)
    return {name: _count(values, full) for name, values in rewards.items()}


def _count(rewards: Sequence[float], full: float) -> PhrasingRewards:
    return PhrasingRewards(
        rows=len(rewards),
        full_rows=sum(reward >= full for reward in rewards),
        partial_rows=sum(0 < reward < full for reward in rewards),
        zero_rows=sum(reward <= 0 for reward in rewards),
        mean=statistics.fmean(rewards),
    )
