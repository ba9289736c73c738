"""Count phrases that plain English does without: `python docs/words.py` (`--show` lists where they are).

Read are the README and the other files for contributors, the pages, the comments of `./dev`, and the strings that are no
docstrings in `src`, help texts and messages, and in `docs/environment_pages.py`, which writes pages. Docstrings of configs,
errors, commands and public names are in the generated pages.
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
    """A tenth of the count when counting began, at most today's."""


VAGUE = "each, found, given"
"""Counted among the identifiers that `src` assigns, not in texts."""
PHRASES = {
    "of its own": Phrase(r"\bof (?:your|its|their|his|our) own\b|\bof (?:yours|theirs)\b", "its own X", 7),
    "names": Phrase(r"\bnam(?:es|ing) (?!of\b|and\b|in\b|are\b|or\b)|\byou name\b|\b(?:is|are) named\b", "sets, is, lists", 7),
    "name": Phrase(
        r"\bname (?:it|them|one|another|some|a|an|the|its|your|this|each|every)\b|\b(?:must|can|may|to|not) name\b"
        r"|\bnamed (?:with|by|in|on|after)\b|\b(?:was|were|be|not) named\b",
        "give, set, choose",
        0,
    ),
    "whose": Phrase(r"\bwhose\b", "two sentences", 4),
    "on the mean": Phrase(r"\bon the mean\b", "on average", 2),
    "beside": Phrase(r"\bbeside\b", "next to, in addition to", 3),
    "come out again": Phrase(r"\bc[oa]m(?:e|es|ing) out again\b", "is reproduced", 1),
    "in place of": Phrase(r"\bin place of\b|\bin (?:its|their|his|\w+'s) place\b", "instead of", 1),
    "for good": Phrase(r"\bfor good\b", "permanently", 0),
    "processor": Phrase(r"\bprocessors?\b", "CPU", 0),
    "such as": Phrase(r"\bsuch as\b", "e.g.", 4),
    "cannot be had": Phrase(r"\bcannot be had\b|\banswered with no\b|\bdeserves? a look\b", "is not available", 0),
    "what was tried": Phrase(
        r"(?m)^#+ (?:What (?:was|ran|could not run)\b.*|Tested|Measured)$|\bw(?:as|ere) not run\b",
        "a page of Benchmarks",
        1,
    ),
    VAGUE: Phrase(r"^(?:each|found|given|kept|made|wanted)$", "configs, requested, recording", 36),
}  # fmt: skip
LABS = ("benchmarks.md", "benchmarks-calls.md", "benchmarks-runs.md", "test-matrix.md", "agreement.md")
"""Pages on what was measured and tried."""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is no docstring."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def identifiers(root: Path) -> Iterator[tuple[str, str]]:
    """Place and name of every parameter and assigned variable."""
    for path in sorted((root / "src" / "gymgate").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                yield f"{path.relative_to(root)}:{node.lineno}", node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield f"{path.relative_to(root)}:{node.lineno}", node.id


def lines_of(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a page, without what stored records say."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not (page.name == "environments-status.md" and line.startswith("|")):
            yield number, line


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Place and text of everything that is read."""
    pages = [
        *root.glob("*.md"),
        *(root / "docs").glob("*.md"),
        *root.glob("environments/**/README.md"),
        *root.glob("examples/**/README.md"),
    ]
    for page in sorted(pages):
        for number, line in lines_of(page):
            yield f"{page.relative_to(root)}:{number}", line
    if (script := root / "dev").exists():
        for number, line in enumerate(script.read_text().splitlines(), 1):
            if comment := re.search(r"(?:^|\s)#\s(.*)", line):
                yield f"dev:{number}", comment[1]
    for path in sorted(
        [*(root / "src" / "gymgate").rglob("*.py"), *(root / "docs").glob("environment_pages.py")]
    ):
        for number, text in messages(path):
            yield f"{path.relative_to(root)}:{number}", text


def found(root: Path = ROOT) -> dict[str, list[tuple[str, str]]]:
    """Each phrase's places, and the text around it."""
    places: dict[str, list[tuple[str, str]]] = {name: [] for name in PHRASES}
    places[VAGUE] = [
        (place, name) for place, name in identifiers(root) if re.match(PHRASES[VAGUE].pattern, name)
    ]
    for place, text in texts(root):
        for name, phrase in PHRASES.items():
            if name == VAGUE or (name == "what was tried" and any(lab in place for lab in LABS)):
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
