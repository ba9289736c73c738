"""`gymgate view` in a browser: a run that grows shows without a reload, and what the reader opened and typed stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_results_view import HOSTILE, append, command, line, make_run

from support.browser import browser

TOUCH = """
const tasks = document.querySelectorAll(".task");
tasks[0].open = true;
document.querySelector("main > details").open = true;
document.forms[0].elements.low.value = "0.5";
document.forms[0].dispatchEvent(new Event("input"));
[...document.querySelectorAll("th")].find(head => head.textContent === "rewards").click();
window.kept = [tasks[0], document.forms[0], document.querySelector("table")];
"""
STATE = """
const tasks = document.querySelectorAll(".task"), sorted = document.querySelectorAll("th[aria-sort]");
return {
  kept: window.kept.every((node, place) => node === [tasks[0], document.forms[0], document.querySelector("table")][place]),
  open: [tasks[0].open, document.querySelector("main > details").open],
  low: document.forms[0].elements.low.value,
  sorted: [...sorted].map(head => head.textContent),
  rewards: [...sorted[0].closest("table").tBodies[0].rows].map(row => row.cells[2].textContent),
  count: document.querySelector("output").textContent,
  shown: [...tasks[0].querySelectorAll(".rollout")].map(node => node.hidden),
  title: document.title,
};
"""


@pytest.mark.heavy
def test_a_growing_run_shows_without_a_reload(tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as window, command(tmp_path / "run") as (process, url):
        window.open(url)
        window.wait_for("document.querySelector('.note').textContent.includes('Waiting')")
        window.run("window.sameDocument = true")
        run = make_run(tmp_path / "run", 8)
        append(run, line(0, 0) + line(0, 1))
        window.wait_for("document.querySelectorAll('.rollout').length === 2")
        window.run(TOUCH)
        append(run, line(0, 2, HOSTILE) + line(0, 3) + line(1, 0) + line(1, 1) + line(1, 3))
        failure = line(
            1,
            2,
            status="failed",
            reward=None,
            final=True,
            error={"kind": "timeout", "type": "T", "message": "late"},
        )
        (run / "failures.jsonl").write_bytes(failure)
        window.wait_for("document.querySelector('.progress').textContent.includes('8 of 8')")
        assert window.run("return window.sameDocument")
        assert window.run(STATE) == {
            "kept": True,
            "open": [True, True],
            "low": "0.5",
            "sorted": ["rewards"],
            "rewards": ["0, 1, 1, failed", "0, 1, 0, 1"],
            "count": "4 conversations",
            "shown": [True, False, True, False],
            "title": "m on e, 2023-11-14",
        }
        assert window.run("return document.querySelectorAll('img').length") == 0
        process.terminate()
        window.wait_for("document.querySelector('.live').textContent.includes('ended')")
