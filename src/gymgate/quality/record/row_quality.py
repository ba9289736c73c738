"""The packaged rows, read without running them: equal rows, answers that prompts give away, rows in two splits."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gymgate.core import codec
from gymgate.gateway.replay.conversation import blocks_of, items_of
from gymgate.gym.catalog import DataFile, Dataset, Environment
from gymgate.quality.recordings import RowData, is_derived
from gymgate.quality.sections import Data
from gymgate.rollouts.answers import answer_of
from gymgate.rollouts.row import row_key
from gymgate.rollouts.row_fields import lacking_params

SHOWN = 20
"""Rows, or groups of rows, that a record lists."""
NO_ANSWERS = "not looked for: its rows have no answers, or answers that are too short or too alike"
ONE_SPLIT = "not compared: its packaged rows are of one split"
ONLY_EXAMPLES = "not compared: it ships only examples"
NO_TASK = "its rows hold only the same start of a conversation: the environment makes the task"
_START = frozenset({"responses_create_params", "agent_ref"})
_SPLITS = {
    "train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "eval": "test", "benchmark": "benchmark",
}  # fmt: skip
"""Types of datasets, and words in names of files, with the split that they mean."""
_OPENING = r"(?:[\s\"'*`$(\[]|\\boxed\{)*"
"""What may stand before an answer, in a prompt as in a row."""
_CLOSING = "\"'*`$)]}.;! \n"
_TELLING = re.compile(
    r"(?:(?:\b|_)(?:answer|solution|ground[ _]truth|expected[ _](?:output|result))[\"'*`]*[ \n]*(?::|=|\bis\b:?)"
    r"|<(?:final_answer|answer|solution|ground_truth)>"
    rf"|\\boxed\{{){_OPENING}"
)
"""Where a prompt says what the answer is."""
_NOT_TELLING = re.compile(
    r"\b(?:not|if|when|example|e\.g|such as|like|wrong|incorrect|candidate|proposed|student|model|assistant|say|write|reply)\b"
    r"[^.?!\n]*$"
)
"""The sentence before it, where it is an instruction, an example, or the answer of somebody who is judged."""
_END = re.compile(r"[\"'*`$)\]}]*(?:[.!;](?=\s|$)|\n|$|</)")
_COMPARED = 300
"""Characters of an answer that are compared."""
_LETTERS = 4
_JUDGEMENTS = frozenset({
    "true", "false", "none", "null", "correct", "incorrect", "right", "wrong", "valid", "invalid", "unknown", "both", "neither",
})  # fmt: skip


class _Answered(NamedTuple):
    """A row with an answer that can be looked for."""

    name: str
    prompt: int
    """Hash of its prompt."""
    answer: str
    said: tuple[str, ...]
    """The text after each place of its prompt that says what the answer is."""


class _Line(NamedTuple):
    """What is kept of a row, because files may be larger than the memory."""

    name: str
    key: str
    """Equal for equal rows."""
    task: str
    """Equal for rows that are equal but for their agent."""
    is_start: bool
    """Whether it has no field but the start of a conversation."""
    answered: _Answered | None


def of_environment(environment: Environment, config: str | Sequence[str] | None = None) -> Data:
    """Measure an environment's packaged rows, raw ones included. `config` names the config that says which split a file is."""
    files = [file for file in environment.data if file.kind in ("rows", "raw") and not is_derived(file.path)]
    return measure(files, environment.config(config).datasets if environment.configs else ())


def measure(files: Sequence[DataFile], datasets: Iterable[Dataset] = ()) -> Data:
    r"""Measure the rows in some files.

    - *Duplicates*: rows of one file that are equal in every field. The order of keys and the `_ng_*` fields that NeMo Gym
      adds do not count. Rows of two files are not compared: examples are copies of other rows. A file is left out if each
      of its rows is the same start of a conversation without another field: there the environment makes the task.
    - *Answer in the prompt*: the prompt says what the answer is (`The answer is`, `Answer:`, `<answer>`, `\boxed{` and the
      like), and what follows, up to the end of the sentence or line, is the row's own answer. An answer that merely stands
      in the prompt is none: questions list options, and passages hold what they are asked for. Not looked for: numbers,
      judgements such as `correct`, texts of fewer than four letters, and labels, which are the answer to two different
      prompts. What also stands so in the prompt of a row with another answer is an instruction or an example.
    - *Rows in two splits*: rows that are equal but for the agent that they name, in files of different splits. A split is
      the type of the dataset in `datasets`, or else a word in the file's name. Examples are no split.
    """
    lines = {file.name: list(_lines(file)) for file in files}
    missing: dict[str, str] = {}
    duplicates = answers_in_prompt = shared = None
    groups: list[tuple[str, ...]] = []
    told: list[str] = []
    common: list[tuple[str, ...]] = []

    if not any(lines.values()):
        missing = dict.fromkeys(("duplicates", "answers_in_prompt", "shared"), "it has no packaged rows")
    elif tasks := [
        rows
        for rows in lines.values()
        if not all(line.is_start for line in rows) or len({line.key for line in rows}) != 1
    ]:
        groups = [group for rows in tasks for group in _equal(rows)]
        duplicates = sum(len(group) - 1 for group in groups)
    else:
        missing["duplicates"] = NO_TASK

    answered = [line.answered for rows in lines.values() for line in rows if line.answered is not None]
    prompts = Counter(answer for answer, _ in {(row.answer, row.prompt) for row in answered})
    answered = [row for row in answered if prompts[row.answer] == 1]  # the others are labels
    if len({row.prompt for row in answered}) > 1:
        told = _telling_their_answer(answered)
        answers_in_prompt = len(told)
    else:
        missing.setdefault("answers_in_prompt", NO_ANSWERS)

    splits = {file.name: split for file in files if (split := split_of(file, datasets)) is not None}
    if len({*splits.values()}) > 1:
        common = _in_two_splits((split, lines[name]) for name, split in splits.items())
        shared = len(common)
    else:
        missing.setdefault("shared", ONE_SPLIT if splits else ONLY_EXAMPLES)

    return Data(
        files={name: len(rows) for name, rows in lines.items()},
        duplicates=duplicates,
        duplicate_rows=tuple(groups[:SHOWN]),
        answers=len(answered),
        answers_in_prompt=answers_in_prompt,
        rows_with_answer=tuple(told[:SHOWN]),
        splits=splits,
        shared=shared,
        shared_rows=tuple(common[:SHOWN]),
        missing=missing,
    )


def split_of(file: DataFile, datasets: Iterable[Dataset]) -> str | None:
    """The split of a file; `None` if it is no split or an example."""
    types = {
        dataset.type
        for dataset in datasets
        if f"/{file.path.as_posix()}".endswith("/" + dataset.path.lstrip("./"))
    }
    if "example" in types:
        return None
    words = [*types, *re.split(r"[^a-z]+", file.path.stem.lower())]
    return None if "example" in words else next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _lines(file: DataFile) -> Iterator[_Line]:
    """The rows that can be read."""
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = codec.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                name = f"{file.name}:{number}"
                fields = {key for key in row if not key.startswith("_ng_")}
                task = {key: value for key, value in row.items() if key != "agent_ref"}
                yield _Line(name, row_key(row), row_key(task), fields <= _START, _answered(name, row))


def _equal(lines: Sequence[_Line]) -> list[tuple[str, ...]]:
    """The groups of equal rows, each by the names of its rows."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        groups[line.key].append(line.name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _in_two_splits(files: Iterable[tuple[str, Sequence[_Line]]]) -> list[tuple[str, ...]]:
    """The first row in each split, for every row that is in several; `files` are splits and rows."""
    names_of_splits: dict[str, dict[str, str]] = defaultdict(dict)
    for split, lines in files:
        for line in lines:
            names_of_splits[line.task].setdefault(split, line.name)
    return [tuple(names.values()) for names in names_of_splits.values() if len(names) > 1]


def _answered(name: str, row: RowData) -> _Answered | None:
    target = None if lacking_params(row) else answer_of(row)
    value = target.value if target is not None else None
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not isinstance(value, str):
        return None
    answer = _normal(value)
    if answer in _JUDGEMENTS or sum(map(str.isalpha, answer)) < _LETTERS:
        return None
    try:
        blocks = blocks_of(items_of(row["responses_create_params"]))
    except (AttributeError, KeyError, TypeError, ValueError):  # an input of no known shape
        return None
    texts = [text for block in blocks for text in (*block.texts, *(output for _, output in block.outputs))]
    prompt = _normal("\n".join(texts))
    said = tuple(
        prompt[match.end() : match.end() + _COMPARED + 20]
        for match in _TELLING.finditer(prompt)
        if not _NOT_TELLING.search(prompt, max(0, match.start() - 200), match.start())
    )
    bare = re.sub(f"^{_OPENING}", "", answer).rstrip(_CLOSING)
    return _Answered(name, hash(prompt), bare, said)


def _normal(text: str) -> str:
    """The text in small letters, with one space or newline where there are several."""
    return "\n".join(" ".join(line.split()) for line in text.casefold().splitlines() if line.strip())


def _telling_their_answer(answered: Sequence[_Answered]) -> list[str]:
    """Names of the rows whose prompt says their answer, and that of no row with another answer says it."""
    said = sorted({(text, row.answer) for row in answered for text in row.said})

    def says(answer: str) -> Iterator[str]:
        """The answers of the rows whose prompt says that it is this one."""
        compared = answer[:_COMPARED]
        for n in range(bisect_left(said, (compared,)), len(said)):
            text, own = said[n]
            if not text.startswith(compared):
                return
            if len(answer) > _COMPARED or _END.match(text, len(compared)):
                yield own

    return [row.name for row in answered if row.said and {*says(row.answer)} == {row.answer}]
