"""docs/environments-checked.md says something of every environment of the releases, and what it says adds up."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from gymgate.catalog import Catalog
from gymgate.check.model import VERDICTS
from gymgate.config import RuntimeConfig
from gymgate.runtime import ensure_runtime

pytestmark = pytest.mark.gym

PAGE = Path(__file__).parents[2] / "docs" / "environments-checked.md"
AGENTS = "responses_api_agents"


class Line(NamedTuple):
    environment: str
    agents: str
    needs: str
    verdict: str
    rewards: str
    reward: str
    seen: str


class Section(NamedTuple):
    told: str
    lines: list[Line]


@pytest.fixture(scope="module")
def page() -> dict[tuple[str, str], Section]:
    """Its sections by release and kind."""
    found = {}
    for text in PAGE.read_text().split("\n## ")[1:]:
        head, told, *rest = [line for line in text.splitlines() if line]
        match = re.fullmatch(r"nemo-gym (\S+): (\w+)", head)
        assert match is not None, head
        cells = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in rest[2:]]
        found[match[1], match[2]] = Section(told, [Line(*each) for each in cells])
    return found


@pytest.mark.parametrize("version", ["0.7.0"])
def test_every_environment_is_on_it(page: dict[tuple[str, str], Section], version: str) -> None:
    runtime = ensure_runtime(RuntimeConfig(version=version))
    catalog = Catalog(runtime.site, runtime.version)
    kinds = {kind for release, kind in page if release == version}
    assert kinds >= {"resources_servers", "environments", AGENTS}
    for kind in kinds:
        every = catalog.agents() if kind == AGENTS else catalog.environments()
        shipped = sorted(each.name for each in every if each.kind == kind)
        assert [line.environment for line in page[version, kind].lines] == shipped


def test_its_counts_are_those_of_its_lines_and_nothing_failed(page: dict[tuple[str, str], Section]) -> None:
    for section in page.values():
        counts = Counter(line.verdict for line in section.lines)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
        rewarded = sum(line.reward != "no" for line in section.lines)
        assert section.told.startswith(f"{len(section.lines)} checked, 20")
        assert f": {told}; {rewarded} returned a reward" in section.told
        assert counts["failed"] == 0


def test_whatever_is_no_match_says_why(page: dict[tuple[str, str], Section]) -> None:
    for key, section in page.items():
        for line in section.lines:
            if line.verdict != "match":
                assert len(line.seen) > 5, (key, line)
            if line.verdict == "differs":
                assert "cause not known" not in line.seen, (key, line)
                assert "recorded " in line.seen, (key, line)
                assert "got " in line.seen, (key, line)
            if line.verdict == "blocked":
                assert re.match(r"[a-z]+: \S", line.seen), (key, line)


def test_it_holds_no_colours_and_no_paths_of_the_machine_that_made_it() -> None:
    text = PAGE.read_text()
    assert "\x1b" not in text
    assert not re.search(r"(?<![\w.:/-])/(?:root|tmp|work|Users)/", text)
