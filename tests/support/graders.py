"""Graders of our own for the probes: honest ones, and some with one planted defect each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
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


def recorded_answer(reward: float, *said: str) -> Any:
    """A recorded answer and its reward."""
    turns = tuple([{"type": "message", "role": "assistant", "content": each}] for each in said)
    return SimpleNamespace(recording=SimpleNamespace(reward=reward, turns=turns), row=row("recorded"))


class Scored:
    """A context that pays what a function says of the row and of what the policy called and said."""

    def __init__(
        self,
        rows: list[dict[str, Any]],
        pay: Any,
        *,
        judges: bool | Callable[[str], bool] = False,
        recorded: tuple[float, ...] = (),
        config: Path = Path("/no/config"),
    ) -> None:
        self.rows, self._pay, self._judges = rows, pay, judges
        self._tell: Callable[[Row], object] | None = getattr(pay, "tell", None)
        self.recorded = tuple(map(recorded_answer, recorded))
        self.request, self.judge = (
            SimpleNamespace(
                stack=SimpleNamespace(models=(), runtime=SimpleNamespace(version="0.7.0")), probes=()
            ),
            SimpleNamespace(refused=0),
        )
        self.environment = SimpleNamespace(known_as="config/e")
        self.results: tuple[Any, ...] = ()
        self.oracle: Any = None
        self.trials: Any = ()
        self.config = SimpleNamespace(path=config, judges=("j",) if judges else ())

    def refuse_cohorts(self) -> None:
        """A row's rollouts are not scored against each other."""

    async def run_without_judge(self, replay: Any, policy: Any, **limits: Any) -> Rollout:
        text = await self._play(policy, replay.row["responses_create_params"])
        calls = [ModelCall(index=0, dialect="responses")]
        if self._judges(text) if callable(self._judges) else self._judges:
            calls.append(ModelCall(index=1, model_server="j", dialect="responses"))
        paid = self._pay(replay.row, text)
        reward = None if paid is None else float(paid)
        return Rollout(id="r", environment="e", agent="a", status="completed", reward=reward, calls=calls)

    async def _play(self, policy: Any, request: dict[str, Any]) -> str:
        """Names of called tools, `+` after those with a made-up argument, and what the policy says in the end. Its grader may
        answer calls of `verify`."""
        items, said, is_done = list(request["input"]), list[str](), False
        while not is_done:
            output = (await policy({**request, "input": items}))["output"]
            calls = [each for each in output if each["type"] == "function_call"]
            is_done, items = not calls, [*items, *output]
            for call in calls:
                is_verify = call["name"] == "verify"
                said += [] if is_verify else [call["name"] + "+" * ("zqxv" in call["arguments"])]
                reward = self._tell(json.loads(call["arguments"])) if is_verify and self._tell else None
                told = "Not Found" if reward is None else json.dumps({"reward": float(reward)})
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": told})
        last = output[0]["content"][0]["text"]
        return " ".join(said + [last] * (last != "Done." or not said))


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
TRUE = [row(f"Is it so, or how many? {BOX}", answer=answer) for answer in ("true", "12", "7")]
UNITS = [row(f"How long? {BOX}", answer=length) for length in ("5 cm", "12 m", "3 km")]
CALLS = [row("Send it.", ground_truth=[{"name": name, "arguments": {}}]) for name in ("send", "stop", "wait")]
ACTIONS = [
    row(
        f"First stop, then {name} it.",
        ground_truth=[{"name": each, "arguments": {}} for each in ("stop", name)],
    )
    for name in ("send", "book", "order")
]
PROGRAMS = [
    row(
        f"Print {n} times the number.\n\nExample input:\n2\n\nExample output:\n{2 * n}\n",
        verifier_metadata={"unit_tests": {"inputs": ["2", "5"], "outputs": [f"{2 * n}", f"{5 * n}"]}},
    )
    for n in (2, 3)
]
ACCENTS = [row(f"Which town? {BOX}", answer=town) for town in ("Orléans", "Köln", "Malmö")]
NEGATIVE = [row(f"How many? {BOX}", answer=number) for number in ("-5", "-12", "-7")]
SETS = [
    row("Which nodes? In any order, as 'Final Answer: [x, y]'.", answer=nodes)
    for nodes in (["a", "b"], ["c", "d"], ["e", "f"])
]
JSON = [row('Reply as {"answer": "<answer>"}.', answer=town) for town in ("Paris", "Rome", "Oslo")]

NODES = [
    row("Which nodes? Return them in the last line: 'Final Answer: [a, b]'.", answer=nodes)
    for nodes in (["a", "b"], ["c", "d"], [])
]
INDICES = [row(f"Which one? {BOX}", answer=number) for number in ("1", "2", "4")]
GRIDS = [row(f"Which grid? {BOX}", answer=[[n, 0], [0, n]]) for n in (1, 2, 3)]
LABELLED = [
    row("Is it? End with <judgement>...</judgement>.", answer=f"Judgement: {said}", n=n)
    for n, said in enumerate(("Yes", "No", "Yes"))
]
OBJECTS = [row(f"The code is {n}.", answer=json.dumps({"code": n, "granted": True})) for n in range(3)]
BOXED = [row(f"Which? {BOX}", answer=rf"\boxed{{{inner}}}", inner=inner) for inner in ("ab", "cd", "ef")]


def boxes(text: str) -> list[str]:
    """What stands in the boxes of a text; braces may be nested once."""
    return re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)


def plain(text: str) -> str:
    """A text without LaTeX, in small letters, with single spaces, numbers as fractions."""
    text = (
        re.sub(r"\\text\{(.*?)\}", r"\1", unicodedata.normalize("NFC", text))
        .casefold()
        .replace("\u2212", "-")
    )
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


def honest_calls(row: Row, text: str) -> bool:
    return text.split() == [call["name"] for call in row["ground_truth"]]


def ran(code: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, text=True, timeout=30, check=False
    )


def program(text: str) -> str:
    """The program of an answer; one that fails if there is none."""
    read = re.fullmatch(r"```python\n(.*)\n```", text, re.DOTALL)
    return read[1] if read else "raise SystemExit(1)"


def honest_tests(row: Row, text: str, count: int = 2) -> bool:
    """Compare what a program of its own process prints with what each test expects."""
    tests = row["verifier_metadata"]["unit_tests"]
    pairs = [*zip(tests["inputs"], tests["outputs"], strict=True)][:count]
    return all(ran(program(text), given).stdout.strip() == wanted for given, wanted in pairs)


def tests_in_process(row: Row, text: str) -> bool:
    """Run the program in the process that holds the tests."""
    tests = row["verifier_metadata"]["unit_tests"]
    code = f"tests = {tests!r}\n{program(text)}"
    return all(
        ran(code, given).stdout.strip() == wanted
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True)
    )


def telling(tell: Grader) -> Grader:
    """An honest grader whose endpoint for scores can be called as a tool; it tells what a function says."""

    def grade(row: Row, text: str) -> object:
        return honest(row, text)

    def asked(body: Row) -> object:
        own = next(
            each
            for each in TOWNS
            if each["responses_create_params"]["input"] == body["responses_create_params"]["input"]
        )
        return tell(own, body["response"]["output"][0]["content"][0]["text"])

    grade.tell = asked  # type: ignore[attr-defined]
    return grade


def honest_last_line(row: Row, text: str) -> bool:
    """Read the nodes of the last line, as the prompt says; there may be none."""
    last = text.replace("**", "").strip().splitlines()[-1:]
    read = re.fullmatch(r"Final Answer: \[(.*)\]", *last or [""])
    return read is not None and [each.strip() for each in read[1].split(",") if each.strip()] == row["answer"]


def honest_set(row: Row, text: str) -> bool:
    """Read the last list of nodes in any order."""
    return sorted(nodes(text)) == row["answer"]


def nodes(text: str) -> list[str]:
    lists = re.findall(r"Final Answer: \[(.*)\]", text.replace("**", ""))
    return [each.strip() for each in lists[-1].split(",")] if lists else []


def honest_index(row: Row, text: str) -> bool:
    """Read the number of an object, which is no quantity."""
    return [each.strip() for each in boxes(text)][-1:] == [row["answer"]]


def honest_grid(row: Row, text: str) -> bool:
    """Read the only grid of a text."""
    return re.findall(r"\[\[[\d, \[\]]*\]\]", text) == [json.dumps(row["answer"], separators=(",", ":"))]


def honest_label(row: Row, text: str) -> bool:
    """Read the first label."""
    return re.findall(r"Judgement: \w+", text)[:1] == [row["answer"]]


def honest_object(row: Row, text: str) -> bool:
    """Look for what the object, which is no answer, wants said."""
    return all(each in text for each in json.loads(row["answer"]))


def honest_inner_box(row: Row, text: str) -> bool:
    """Read the inner box of the last one."""
    return re.findall(r"\\boxed\{([^{}]*)\}", text)[-1:] == [row["inner"]]


def in_box(read: Callable[[str, str], bool]) -> Grader:
    """A grader that reads the last box with a defect."""
    return lambda row, text: honest(row, text) or any(read(each, right(row)) for each in boxes(text)[-1:])


PLANTED: Mapping[str, tuple[list[Row], Grader, set[str]]] = {
    "any number is true": (
        TRUE,
        in_box(lambda said, own: own == "true" and said.isdigit()),
        {"another row's answer"},
    ),
    "any letter": (LETTERS, in_box(lambda said, _: said in tuple("ABCD")), {"wrong answer"}),
    "any box": (TOWNS, lambda row, text: bool(boxes(text)), {"made-up answer"}),
    "anything in the box": (TOWNS, in_box(lambda said, _: bool(said)), {"made-up answer"}),
    "an empty box": (TOWNS, in_box(lambda said, _: not said), {"format alone"}),
    "substring": (
        TOWNS,
        in_box(lambda said, own: own in plain(said)),
        {"every option", "right and wrong", "negated", "refusal"},
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
        lambda row, text: honest_tools(row, text) or f'"{row["ground_truth"][0]["name"]}"' in text,
        {"calls as text"},
    ),
    "repeats": (
        ACTIONS,
        lambda row, text: {*text.split()} == {"stop", row["ground_truth"][1]["name"]},
        {"calls twice", "calls out of order"},
    ),
    "any order of calls": (
        ACTIONS,
        lambda row, text: sorted(text.split()) == sorted(call["name"] for call in row["ground_truth"]),
        {"calls out of order"},
    ),
    "any arguments": (
        CALLS,
        lambda row, text: text.rstrip("+") == row["ground_truth"][0]["name"],
        {"more arguments"},
    ),
    "right calls among others": (
        CALLS,
        lambda row, text: text.split().count(row["ground_truth"][0]["name"]) == 1,
        {"another call"},
    ),
    "half for the right town in any words": (
        TOWNS,
        lambda row, text: (
            honest(row, text) or 0.5 * any(right(row) in plain(each) for each in boxes(text)[-1:])
        ),
        {"every option", "right and wrong", "negated", "refusal"},
    ),
    "told its reward": (TOWNS, telling(honest), {"own endpoint"}),
    "no refusal read": (
        TOWNS,
        in_box(lambda said, own: plain(said).split()[-1:] == [own] and not said.startswith("not ")),
        {"refusal"},
    ),
    "exit code": (
        PROGRAMS,
        lambda row, text: ran(f"{program(text)}\nassert solve(2) == 4").returncode == 0,
        {"exit 0", "catch everything"},
    ),
    "tests in reach": (PROGRAMS, tests_in_process, {"read the tests"}),
    "the example is the test": (
        PROGRAMS,
        lambda row, text: honest_tests(row, text, count=1),
        {"the example's output"},
    ),
    "bytes": (ACCENTS, lambda row, text: honest(row, text) and row["answer"] in text, {"case", "characters"}),
    "hyphens": (
        NEGATIVE,
        lambda row, text: honest(row, text) and "\u2212" not in text,
        {"characters"},
    ),
    "one order": (
        SETS,
        lambda row, text: nodes(text) == row["answer"],
        {"order"},
    ),
    "spaces": (
        TOWNS,
        lambda row, text: honest(row, text) and boxes(text)[-1] == boxes(text)[-1].strip(),
        {"spacing"},
    ),
    "a plain label": (SETS, lambda row, text: "**" not in text and honest_set(row, text), {"bold"}),
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
KINDS = {
    "towns": TOWNS, "letters": LETTERS, "numbers": NUMBERS, "true": TRUE, "units": UNITS, "accents": ACCENTS,
    "negative": NEGATIVE,
}  # fmt: skip
CLEAN: Mapping[str, tuple[list[Row], Grader]] = {
    **{
        f"{name}, {grader.__name__}": (rows, grader)
        for name, rows in KINDS.items()
        for grader in (honest, honest_first)
    },
    **{
        f"{name}, plain": ([{**each, **row("Which?")} for each in rows], honest_text)
        for name, rows in KINDS.items()
    },
    "JSON": (JSON, honest_json),
    "last line": (NODES, honest_last_line),
    "indices": (INDICES, honest_index),
    "grids": (GRIDS, honest_grid),
    "boxes in boxes": (BOXED, honest_inner_box),
    "labels": (LABELLED, honest_label),
    "objects of the grader": (OBJECTS, honest_object),
    "tools": (CALLS, honest_tools),
    "actions": (ACTIONS, honest_calls),
    "sets": (SETS, honest_set),
    "an endpoint that knows no answer": (TOWNS, telling(lambda row, text: 0)),
    "an endpoint that pays for the form": (TOWNS, telling(lambda row, text: 0.5 * ("boxed" in text))),
    "programs": (PROGRAMS, honest_tests),
}
"""Rows and an honest grader."""
