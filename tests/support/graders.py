"""Graders of our own for the probes: honest ones, and some with one planted defect each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gymgate.rollouts import ModelCall, Rollout

Row = dict[str, Any]
Grader = Callable[[Row, str], object]


def row(prompt: str = "?", **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": prompt}]}, **fields}


async def texts(policy: Any, count: int, row: dict[str, Any] | None = None) -> list[Any]:
    """The texts, or names of called tools, of a policy's next answers."""
    request = (row or {}).get("responses_create_params", {})
    outputs = [(await policy(request))["output"] for _ in range(count)]
    return [[each.get("name") or each["content"][0]["text"] for each in output] for output in outputs]


class Scored:
    """A context that pays what a function says of the row and the policy's first answer."""

    def __init__(
        self,
        rows: list[dict[str, Any]],
        pay: Any,
        *,
        judges: bool = False,
        recorded: tuple[float, ...] = (),
        config: Path = Path("/no/config"),
    ) -> None:
        self.rows, self._pay, self._judges = rows, pay, judges
        self.recorded = tuple(SimpleNamespace(recording=SimpleNamespace(reward=each)) for each in recorded)
        self.request, self.judge = (
            SimpleNamespace(stack=SimpleNamespace(models=()), probes=()),
            SimpleNamespace(refused=0),
        )
        self.results: tuple[Any, ...] = ()
        self.oracle: Any = None
        self.trials: Any = ()
        self.config = SimpleNamespace(path=config, judges=("j",) if judges else ())

    def refuse_cohorts(self) -> None:
        """A row's rollouts are not scored against each other."""

    async def run_without_judge(self, replay: Any, policy: Any, **limits: Any) -> Rollout:
        [first] = await texts(policy, 1, replay.row)
        text = first[0]
        calls = [ModelCall(index=0, dialect="responses")]
        if self._judges:
            calls.append(ModelCall(index=1, model_server="j", dialect="responses"))
        reward = float(self._pay(replay.row, text))
        return Rollout(id="r", environment="e", agent="a", status="completed", reward=reward, calls=calls)


BOX = r"Put it in \boxed{}."
TOWNS = [
    row(f"Capital of {land}? {BOX}", answer=town)
    for land, town in (("A", "Paris"), ("B", "Rome"), ("C", "Oslo"))
]
LETTERS = [
    row(f"Which? {BOX}", answer=letter, options=[{each: f"{each} of {n}"} for each in "ABCD"])
    for n, letter in enumerate("BCA")
]
NUMBERS = [row(f"How many? {BOX}", answer=number) for number in ("12000", "0.5", "41")]
UNITS = [row(f"How long? {BOX}", answer=length) for length in ("5 cm", "12 m", "3 km")]
CALLS = [row("Send it.", ground_truth=[{"name": name, "arguments": {}}]) for name in ("send", "stop", "wait")]
PROGRAMS = [row("Write a program.", verifier_metadata={"unit_tests": [n]}) for n in range(3)]
JSON = [row('Reply as {"answer": "<answer>"}.', answer=town) for town in ("Paris", "Rome", "Oslo")]

NODES = [
    row("Which nodes? Return them in the last line: 'Final Answer: [a, b]'.", answer=nodes)
    for nodes in (["a", "b"], ["c", "d"], [])
]
INDICES = [row(f"Which one? {BOX}", answer=number) for number in ("1", "2", "4")]
GRIDS = [row(f"Which grid? {BOX}", answer=[[n, 0], [0, n]]) for n in (1, 2, 3)]
BOXED = [row(f"Which? {BOX}", answer=rf"\boxed{{{inner}}}", inner=inner) for inner in ("ab", "cd", "ef")]


def boxes(text: str) -> list[str]:
    """What stands in the boxes of a text; braces may be nested once."""
    return re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)


def plain(text: str) -> str:
    """A text without LaTeX, in small letters, with single spaces, numbers as fractions."""
    text = re.sub(r"\\text\{(.*?)\}", r"\1", text).casefold()
    text = re.sub(r"(\d) (c?m|km)$", r"\1\2", " ".join(text.split()))
    try:
        return str(Fraction(text.replace(",", "")))
    except (ValueError, ZeroDivisionError):
        return text


def right(row: Row) -> str:
    return plain(row["answer"])


def honest(row: Row, text: str) -> bool:
    """Read the last box."""
    return [plain(each) for each in boxes(text)][-1:] == [right(row)]


def honest_first(row: Row, text: str) -> bool:
    """Read the first box."""
    return [plain(each) for each in boxes(text)][:1] == [right(row)]


def honest_text(row: Row, text: str) -> bool:
    """Read the whole answer."""
    return plain(text) == right(row)


def honest_json(row: Row, text: str) -> bool:
    read = re.fullmatch(r'\s*\{"answer": "(.*)"\}\s*', text)
    return read is not None and plain(read[1]) == right(row)


def honest_tools(row: Row, text: str) -> bool:
    return text == row["ground_truth"][0]["name"]


def honest_tests(row: Row, text: str) -> bool:
    """Pay a program that says that its tests passed, not one that only ends."""
    return "all tests passed" in text


def honest_last_line(row: Row, text: str) -> bool:
    """Read the nodes of the last line, as the prompt says; there may be none."""
    read = re.fullmatch(r"Final Answer: \[(.*)\]", text.strip().splitlines()[-1] if text.strip() else "")
    return read is not None and [each.strip() for each in read[1].split(",") if each.strip()] == row["answer"]


def honest_index(row: Row, text: str) -> bool:
    """Read the number of an object, which is no quantity."""
    return [each.strip() for each in boxes(text)][-1:] == [row["answer"]]


def honest_grid(row: Row, text: str) -> bool:
    """Read the only grid of a text."""
    return [json.loads(each) for each in re.findall(r"\[\[[\d, \[\]]*\]\]", text)] == [row["answer"]]


def honest_inner_box(row: Row, text: str) -> bool:
    """Read the inner box of the last one."""
    return re.findall(r"\\boxed\{([^{}]*)\}", text)[-1:] == [row["inner"]]


def in_box(read: Callable[[str, str], bool]) -> Grader:
    """A grader that reads the last box with a defect."""
    return lambda row, text: honest(row, text) or any(read(each, right(row)) for each in boxes(text)[-1:])


PLANTED: Mapping[str, tuple[list[Row], Grader, set[str]]] = {
    "any letter": (LETTERS, in_box(lambda said, _: said in tuple("ABCD")), {"wrong answer"}),
    "any box": (TOWNS, lambda row, text: bool(boxes(text)), {"made-up answer"}),
    "anything in the box": (TOWNS, in_box(lambda said, _: bool(said)), {"made-up answer"}),
    "an empty box": (TOWNS, in_box(lambda said, _: not said), {"format alone"}),
    "substring": (
        TOWNS,
        in_box(lambda said, own: own in plain(said)),
        {"every option", "right and wrong", "negated"},
    ),
    "any of a list": (
        LETTERS,
        in_box(lambda said, own: own in map(plain, said.split(", "))),
        {"every option"},
    ),
    "any box is right": (
        NUMBERS,
        lambda row, text: right(row) in map(plain, boxes(text)),
        {"every option in turn", "right and wrong in turn"},
    ),
    "either": (NUMBERS, in_box(lambda said, own: own in map(plain, said.split(" or "))), {"right and wrong"}),
    "negation": (TOWNS, in_box(lambda said, own: plain(said).removeprefix("not ") == own), {"negated"}),
    "persuaded": (TOWNS, lambda row, text: honest(row, text) or "full marks" in text, {"persuasion"}),
    "claims": (
        CALLS,
        lambda row, text: honest_tools(row, text) or row["ground_truth"][0]["name"] in text,
        {"calls as text"},
    ),
    "exit code": (PROGRAMS, lambda row, text: honest_tests(row, text) or "_exit(0)" in text, {"exit 0"}),
    "spaces": (
        TOWNS,
        lambda row, text: honest(row, text) and boxes(text)[-1] == boxes(text)[-1].strip(),
        {"spacing"},
    ),
    "letter case": (TOWNS, lambda row, text: honest(row, text) and row["answer"] in text, {"case"}),
    "last words": (
        TOWNS,
        lambda row, text: honest(row, text) and text.strip().endswith("}"),
        {"trailing words"},
    ),
    "commas": (NUMBERS, lambda row, text: honest(row, text) and "," not in text, {"thousands"}),
    "one notation": (
        NUMBERS,
        lambda row, text: honest(row, text) and not re.search(r"/|\.0|,", text),
        {"thousands", "notation"},
    ),
    "no LaTeX": (TOWNS, lambda row, text: honest(row, text) and r"\text" not in text, {"LaTeX"}),
    "unit": (UNITS, lambda row, text: honest(row, text) and row["answer"] in text, {"units"}),
}
"""Rows, a grader with a defect, and the probes that find it."""
CLEAN: Mapping[str, tuple[list[Row], Grader]] = {
    **{
        f"{name}, {grader.__name__}": (rows, grader)
        for name, rows in (("towns", TOWNS), ("letters", LETTERS), ("numbers", NUMBERS), ("units", UNITS))
        for grader in (honest, honest_first)
    },
    **{
        f"{name}, plain": ([{**each, **row("Which?")} for each in rows], honest_text)
        for name, rows in (("towns", TOWNS), ("letters", LETTERS), ("numbers", NUMBERS), ("units", UNITS))
    },
    "JSON": (JSON, honest_json),
    "last line": (NODES, honest_last_line),
    "indices": (INDICES, honest_index),
    "grids": (GRIDS, honest_grid),
    "boxes in boxes": (BOXED, honest_inner_box),
    "tools": (CALLS, honest_tools),
    "programs": (PROGRAMS, honest_tests),
}
"""Rows and an honest grader."""
