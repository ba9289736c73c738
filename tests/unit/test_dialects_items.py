"""Every row of the table of what the gateway adds, drops and completes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymgate.gateway.dialects import translate_answer, with_text_ids
from support.answer_items import ROWS, items_of

DOCS = Path(__file__).parents[2] / "docs/agreement.md"
HEADING = "## What the gateway adds, drops and completes"


@pytest.mark.parametrize("name", ROWS)
def test_an_agent_gets_the_items_of_the_table(name: str) -> None:
    row = ROWS[name]
    answer = with_text_ids({"choices": [row.choice], "model": "m", "created": 1}, "chat")
    response = translate_answer(answer, {"input": "hi"}, "chat", "responses")
    assert (response["status"], items_of(response)) == (row.status, row.items)


def test_only_reasoning_is_only_thinking_for_agents_that_speak_messages() -> None:
    row = ROWS["only reasoning"]
    message = translate_answer({"choices": [row.choice]}, {"messages": []}, "chat", "messages")
    assert [block["type"] for block in message["content"]] == ["thinking"]


def test_the_table_has_these_rows() -> None:
    section = DOCS.read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert [cells[1].strip() for cells in lines[1:]] == [*ROWS]
    for cells, row in zip(lines[1:], ROWS.values(), strict=True):
        releases = {"0.6.0": cells[3].strip(), "0.7.0": cells[4].strip()}
        assert {version for version, said in releases.items() if said != "same"} == {*row.nemo_gym}
