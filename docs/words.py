"""Count phrases that plain English does without: `python docs/words.py` (`--show` lists where they are).

Read are the README, the pages (but not those of environments, which quote prompts), and the strings in `src` that are no
docstrings: help texts and messages. Docstrings of configs, errors, commands and public names are in the generated pages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Phrase(NamedTuple):
    pattern: str
    instead: str
    limit: int
    """A tenth of the count when counting began."""


PHRASES = {
    "of its own": Phrase(r"\bof (?:your|its|their|his|our) own\b|\bof (?:yours|theirs)\b", "its own X", 7),
    "names": Phrase(r"\bnam(?:es|ing) (?!of\b|and\b|in\b|are\b|or\b)|\byou name\b|\b(?:is|are) named\b", "sets, is, lists", 7),
    "whose": Phrase(r"\bwhose\b", "two sentences", 4),
    "on the mean": Phrase(r"\bon the mean\b", "on average", 2),
    "beside": Phrase(r"\bbeside\b", "next to, in addition to", 3),
    "come out again": Phrase(r"\bc[oa]m(?:e|es|ing) out again\b", "is reproduced", 1),
    "in place of": Phrase(r"\bin place of\b|\bin (?:its|their|his|\w+'s) place\b", "instead of", 1),
    "for good": Phrase(r"\bfor good\b", "permanently", 1),
    "processor time": Phrase(r"\bprocessor times?\b", "CPU time", 1),
    "such as": Phrase(r"\bsuch as\b", "e.g.", 4),
    "cannot be had": Phrase(r"\bcannot be had\b|\banswered with no\b|\bdeserves? a look\b", "is not available", 0),
    "what was tried": Phrase(
        r"(?m)^#+ (?:What (?:was|ran|could not run)\b.*|Tested|Measured)$|\bw(?:as|ere) not run\b",
        "a page of Benchmarks",
        1,
    ),
}  # fmt: skip
LABS = ("benchmarks.md", "test-matrix.md", "agreement.md")
"""Pages on what was measured and tried."""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is no docstring."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Place and text of everything that is read."""
    pages = [
        root / "README.md",
        *(root / "docs").glob("*.md"),
        *root.glob("environments/**/README.md"),
        *root.glob("examples/**/README.md"),
    ]
    for page in sorted(pages):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if page.name == "environments-status.md" and line.startswith("|"):
                continue  # what stored records say
            yield f"{page.relative_to(root)}:{number}", line
    for path in sorted((root / "src" / "gymgate").rglob("*.py")):
        for number, text in messages(path):
            yield f"{path.relative_to(root)}:{number}", text


def found(root: Path = ROOT) -> dict[str, list[tuple[str, str]]]:
    """Each phrase's places, and the text around it."""
    places: dict[str, list[tuple[str, str]]] = {name: [] for name in PHRASES}
    for place, text in texts(root):
        for name, phrase in PHRASES.items():
            if name == "what was tried" and any(lab in place for lab in LABS):
                continue
            for match in re.finditer(phrase.pattern, text, re.IGNORECASE):
                around = text[max(match.start() - 60, 0) : match.end() + 60]
                places[name].append((place, " ".join(around.split())))
    return places


def main(arguments: list[str]) -> int:
    roots = [Path(each) for each in arguments if not each.startswith("-")]
    places = found(*roots[:1])
    for name, each in places.items():
        print(f"{len(each):5} of {PHRASES[name].limit:3}  {name}  (say: {PHRASES[name].instead})")
        if "--show" in arguments:
            for place, around in each:
                print(f"         {place}: {around}")
    return int(any(len(each) > PHRASES[name].limit for name, each in places.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
