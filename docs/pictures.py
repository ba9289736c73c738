"""Make docs/terminal.svg and docs/report.png from a real run: `./dev python docs/pictures.py`. Needs chromium; calls no model."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))
from support.browser import browser  # noqa: E402

COMMANDS = ("gymgate run mcqa calendar workplace_assistant -r 4 -o runs/demo", "gymgate report runs/demo")
COLUMNS, WIDTH, HEIGHT = 112, 1000, 1080


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        for command in COMMANDS:
            console.print(Text(f"$ {command}", style="bold"), Text(printed(command, directory)), sep="\n")
        picture = console.export_svg(title="gymgate")
        (DOCS / "terminal.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))
        with browser(Path(directory, "profile")) as window:
            window.open(next(Path(directory).rglob("*.html")).as_uri())
            window.shoot(DOCS / "report.png", WIDTH, HEIGHT)


def printed(command: str, directory: str) -> str:
    """Run a command, and return what it prints from its table on."""
    argv = [sys.executable, "-m", *shlex.split(command)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(argv, cwd=directory, check=True, timeout=600, text=True, **streams)
    lines = done.stdout.splitlines()
    return "\n".join(lines[next((n for n, line in enumerate(lines) if line.startswith("environment ")), 0) :])


if __name__ == "__main__":
    main()
