"""Right answers as rows hold them, and the phrasings in which they can be said."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gateway.replay.conversation import blocks_of, items_of
from gymgate.quality.record.context import constant_policy, respond
from gymgate.quality.recordings import RowData
from gymgate.rollouts.answers import DONE, Calls, answer_of, calls_in

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
    Phrasing(r"\boxed{", "formula", "}"),
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
    r"|\b(?P<label>(?:Final |Correct )?(?:Answer|Judge?ment|Verdict|Result|Choice)|Final answer):[ ]?(?P<list>\[)?"
    r"|(?P<parentheses>double parentheses|\(\(\w+\)\))"
)
"""How prompts ask for an answer, and how recorded answers give it."""


def forms_of(row: RowData) -> Mapping[str, Answer]:
    """The forms in which a row's answer can be said.

    answer: as text; JSON: as a JSON string; items: those of a list, with commas; item: the first of a list of texts; grid:
    its lines, with spaces; lines: the same without spaces; option: the text of the option that it names; formula: between
    `\\(` and `\\)`; calls: one a turn, or at once.
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
    elif r"\(" not in text:
        forms["formula"] = rf"\({text}\)"
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
    return given_in("\n".join(block.text for block in blocks_of(items_of(row["responses_create_params"]))))


def given_in(text: str) -> tuple[Phrasing, ...]:
    """The phrasing that a text shows last, in each form that the answer may have; empty if no pattern finds one."""
    matches = [*_ASKED.finditer(text)]
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
    forms = ("items",) if last["list"] else ("answer", "option", "grid", "lines", "items", "item", "formula")
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
