"""docs/tables.js in a browser: a click on a head sorts a table, a field filters its lines."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "tables.js"
PROBE = """
addEventListener("load", () => {
  const heads = [...document.querySelectorAll("th")];
  const rows = () => [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
  const names = () => rows().map((row) => row.cells[0].textContent);
  heads[1].click();
  const up = names();
  heads[1].click();
  const down = names();
  const field = document.querySelector(".table-filter");
  field.value = "MATCH 3";
  field.dispatchEvent(new Event("input"));
  document.title = [up[0], up.at(-1), down[0], names().join("+")].join(" ");
});
"""


@pytest.mark.heavy
def test_a_table_sorts_by_number_and_filters(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium on PATH")
    values = ["10", "9.5", "-", "100", "2", "3", "4", "30", "6", "7"]
    lines = "".join(f"<tr><td>e{n}</td><td>{value}</td><td>match</td></tr>" for n, value in enumerate(values))
    page = tmp_path / "environments-status.html"
    page.write_text(
        "<div class='md-typeset'><table><thead><tr><th>name</th><th>value</th><th>verdict</th>"
        "</tr></thead>"
        f"<tbody>{lines}</tbody></table></div><script>{SCRIPT.read_text()}</script><script>{PROBE}</script>"
    )
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
        f"file://{page}",
    ]  # fmt: skip
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    title = re.search(r"<title>(.*)</title>", dumped)
    assert title is not None
    assert title[1] == "e4 e2 e3 e3+e7+e5"
