"""The README, the docs, help texts and messages hold few of the phrases that docs/words.py counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def words(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docs" / "words.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_counts_stay_a_tenth_of_what_they_were() -> None:
    counted = words("--show")
    assert counted.returncode == 0, counted.stdout


def test_pages_help_and_messages_are_counted_and_docstrings_are_not(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("A place of its own.\n")
    (tmp_path / "docs" / "page.md").write_text("This\nis for good.\n")
    (tmp_path / "docs" / "environment_pages.py").write_text('"""Beside it."""\nHEAD = \'Name it with -x.\'\n')
    (tmp_path / "dev").write_text("#!/bin/sh\necho whose  # the processor's\n")
    source = tmp_path / "src" / "gymgate" / "cli"
    source.mkdir(parents=True)
    code = '"""Whose."""\nMESSAGE = f"{1} such as 2"\nOPTION = dict(help="kept for good")\nname = "names a file"\ngiven = 1\n'
    (source / "run.py").write_text(code)
    counted = words(str(tmp_path), "--show").stdout
    places = [line.split(": ")[0].strip() for line in counted.splitlines() if line.startswith("      ")]
    assert places == [
        "README.md:1",
        "src/gymgate/cli/run.py:4",
        "docs/environment_pages.py:2",
        "docs/page.md:2",
        "src/gymgate/cli/run.py:3",
        "dev:2",
        "src/gymgate/cli/run.py:2",
        "src/gymgate/cli/run.py:5",
    ]
    assert "whose" not in [line.split(": ")[0] for line in counted.splitlines()]
    assert words(str(tmp_path)).returncode == 1  # "for good" twice
