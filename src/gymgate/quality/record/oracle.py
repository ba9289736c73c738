"""Oracle: does the right answer, as the rows hold it, get the reward? And in which phrasing?"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.config import POLICY
from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gateway.replay.conversation import blocks_of, items_of
from gymgate.quality.probe import cohort_size
from gymgate.quality.record.bench import Bench, Subject, constant_policy, respond, reward_of
from gymgate.quality.record.sections import Oracle, OracleReason, PhrasingRewards
from gymgate.quality.recordings import RowData
from gymgate.rollouts import Rollout
from gymgate.rollouts.answers import DONE, NESTED_FIELDS, Calls, answer_of, calls_in

ROWS = 10
AT_ONCE = 8
TIMEOUT_S = 30.0
"""Seconds for one rollout."""
MAX_CALLS = 20
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


async def measure(bench: Bench) -> Oracle:
    """Run up to `ROWS` rows with their right answer in every phrasing, and with another row's in each that is paid."""
    if cohort_size(bench.config) > 1:
        return Oracle(reason="scored against siblings")
    rows = [(n, row, answer) for n, row in enumerate(bench.rows) if (answer := answer_of(row))][:ROWS]
    if not rows:
        return Oracle(reason=_why_unanswered(bench))
    run = _Runs(bench)
    forms = {n: forms_of(row) for n, row, _ in rows}
    asked = {n: asked_for(row) for n, row, _ in rows}
    tried = {
        n: [each for each in dict.fromkeys((*asked[n], *PHRASINGS)) if each.form in forms[n]]
        for n, _, _ in rows
    }
    own = await run.all([(n, row, each, forms[n]) for n, row, _ in rows for each in tried[n]])
    if not run.counted:
        judged = run.judged and "needs a judge"
        return Oracle(
            reason=judged or "other", detail="" if judged else run.first_error[:300], field=rows[0][2].field
        )
    full = max([1.0, *(each.recording.reward or 0.0 for each in bench.recorded)])
    paid = _paid(own, full)
    known = dict.fromkeys(each for n in tried for each in tried[n] if each.name in paid)
    more = {n: [each for each in known if each not in tried[n] and each.form in forms[n]] for n in tried}
    paid_elsewhere = await run.all([(n, row, each, forms[n]) for n, row, _ in rows for each in more[n]])
    own = {name: {**rewards, **paid_elsewhere.get(name, {})} for name, rewards in own.items()}
    tried = {n: [*tried[n], *more[n]] for n in tried}
    wrong = {n: _other(forms[n], [other for m, other in forms.items() if m != n]) for n in forms}
    others = await run.all(
        [
            (n, row, each, other)
            for n, row, _ in rows
            if (other := wrong[n]) is not None
            for each in tried[n]
            if each.name in paid and each.form in other
        ]
    )
    best = {
        n: max((rewards[n] for rewards in own.values() if n in rewards), default=None) for n, _, _ in rows
    }
    given = [reward for reward in best.values() if reward is not None]
    unsolved = [n for n, reward in best.items() if reward is None or reward < full]
    missing = {} if others or not paid else {"others": "no other answer of a row was scored"}
    if unscored := [f"row {n}" for n, reward in best.items() if reward is None]:
        missing["reward"] = f"no reward in any phrasing for {', '.join(unscored)}"
    return Oracle(
        field=Counter(answer.field for _, _, answer in rows).most_common(1)[0][0],
        asked_for=_most_asked(asked, tried, paid),
        rows=len(rows),
        solved=sum(reward >= full for reward in given),
        full=full,
        reward=statistics.fmean(given),
        phrasings={name: _count(rewards, full) for name, rewards in own.items()},
        others={name: _count(rewards, full) for name, rewards in others.items()},
        unsolved=tuple(f"row {n}" for n in unsolved),
        suspect=tuple(f"row {n}" for n in _suspect(unsolved, asked)),
        missing=missing,
    )


def _paid(own: Mapping[str, Mapping[int, float]], full: float) -> set[str]:
    """The phrasings that earn the full reward in a row."""
    return {name for name, rewards in own.items() if any(reward >= full for reward in rewards.values())}


def _suspect(unsolved: Sequence[int], asked: Mapping[int, Sequence[Phrasing]]) -> list[int]:
    """The unsolved rows, fewer than half, that ask for the same as a solved one."""
    solved = {tuple(phrasings) for n, phrasings in asked.items() if n not in unsolved}
    return [n for n in unsolved if tuple(asked[n]) in solved] if 2 * len(unsolved) < len(asked) else []


def forms_of(row: RowData) -> Mapping[str, Answer]:
    """The forms in which a row's answer can be said.

    answer: as text; JSON: as a JSON string; items: those of a list, with commas; grid: its lines, with spaces; lines: the
    same without spaces; option: the text of the option that it names; calls: one a turn, or at once.
    """
    own = answer_of(row)
    assert own is not None
    if calls := calls_in(own.value):
        return {"calls": calls, **({"calls at once": calls} if len(calls) > 1 else {})}
    value = own.value
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError):
            value = codec.loads(value.encode())
    text = own.value if isinstance(own.value, str) else codec.dumps(value).decode()
    forms: dict[str, Answer] = {"answer": text, "JSON": codec.dumps(text).decode()}
    if isinstance(value, list) and value and all(isinstance(line, list) for line in value):
        grid = "\n".join(" ".join(map(str, line)) for line in value)
        forms |= {"grid": grid, "lines": grid.replace(" ", "")}
    elif isinstance(value, list):
        forms["items"] = ", ".join(map(str, value))
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
    forms = ("items",) if last["list"] else ("answer", "option", "grid", "lines", "items")
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
    """Runs rows in phrasings, several at once, without a judge unless the user named one."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._free = asyncio.Semaphore(AT_ONCE)
        self.counted = 0
        """Rollouts with a reward that counts."""
        self.judged = False
        """Whether a judge was asked whose answer is not recorded."""
        self.first_error = "no rollout gave a reward"

    async def all(
        self, attempts: Sequence[tuple[int, RowData, Phrasing, Mapping[str, Answer]]]
    ) -> dict[str, dict[int, float]]:
        """The rewards that count, by the name of the phrasing and the number of the row."""
        rewards = await asyncio.gather(
            *(self._run(row, policy_of(phrasing, forms)) for _, row, phrasing, forms in attempts)
        )
        rewards_of: dict[str, dict[int, float]] = defaultdict(dict)
        for (n, _, phrasing, _), reward in zip(attempts, rewards, strict=True):
            if reward is not None:
                rewards_of[phrasing.name][n] = reward
        return dict(rewards_of)

    async def _run(self, row: RowData, policy: PolicyCallable) -> float | None:
        async with self._free:
            rollout = await self._bench.run_without_judge(
                Subject("oracle", row, lambda: policy), policy, timeout_s=TIMEOUT_S, max_calls=MAX_CALLS
            )
        asked = any(call.model_server != POLICY for call in rollout.calls) or self._bench.judge.refused > 0
        if asked and not self._bench.request.models:
            self.judged = True
            return None
        return self._reward(rollout)

    def _reward(self, rollout: Rollout) -> float | None:
        if (reward := reward_of(rollout)) is not None:
            self.counted += 1
        elif rollout.error is not None and not self.counted:
            self.first_error = f"{rollout.error.type}: {rollout.error.message}"
        return reward


def _why_unanswered(bench: Bench) -> OracleReason:
    fields = {*bench.rows[0], *_inside(bench.rows[0])} if bench.rows else set()
    if fields & _PROGRAMS:
        return "answer is a program or patch"
    if fields & _JUDGED or bench.config.judges:
        return "needs a judge"
    return "no answer in the rows"


def _inside(row: RowData) -> Iterator[str]:
    for name in NESTED_FIELDS:
        if isinstance(held := row.get(name), dict):
            yield from held


def _other(own: Mapping[str, Answer], others: Sequence[Mapping[str, Answer]]) -> Mapping[str, Answer] | None:
    """The first of the other rows' answers that is another one: neither of the two says all that the other says."""
    said = _said(own)
    return next((forms for forms in others if not (said <= _said(forms) or _said(forms) <= said)), None)


def _said(forms: Mapping[str, Answer]) -> frozenset[str]:
    """The texts of an answer: itself, or the values of a JSON object, without which it may be the answer of another row."""
    text = str(next(iter(forms.values())))
    try:
        return frozenset(_texts(codec.loads(text.encode())))
    except ValueError:
        return frozenset(_texts(text))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
        return
    text = value if isinstance(value, str) else codec.dumps(value).decode()
    text = text.strip().casefold()
    try:
        yield str(float(text))
    except ValueError:
        yield text


def _most_asked(
    asked: Mapping[int, Sequence[Phrasing]], tried: Mapping[int, Sequence[Phrasing]], paid: set[str]
) -> str:
    """The phrasing that most prompts ask for; of its forms the one that is paid, else the first."""
    names = [[phrasing.name for phrasing in asked[n] if phrasing in tried[n]] for n in asked]
    chosen = [next((name for name in row if name in paid), row[0]) for row in names if row]
    return Counter(chosen).most_common(1)[0][0] if chosen else ""


def _count(rewards: Mapping[int, float], full: float) -> PhrasingRewards:
    values = rewards.values()
    return PhrasingRewards(
        rows=len(values),
        full=sum(reward >= full for reward in values),
        part=sum(0 < reward < full for reward in values),
        none=sum(reward <= 0 for reward in values),
        mean=statistics.fmean(values),
    )
