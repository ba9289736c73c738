"""The command lines of a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt


def command_lines(page: Path) -> Iterator[str]:
    """What a page says to type: `bash` and indented blocks, continued lines in one, and what follows `$ ` in shown output."""
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        content = re.sub(r"\\\n\s*", " ", token.content)
        language = token.info.strip()
        if token.type == "code_block" or (token.type == "fence" and language == "bash"):
            yield from content.splitlines()
        elif token.type == "fence" and language in ("console", "text"):
            yield from (line.removeprefix("$ ") for line in content.splitlines() if line.startswith("$ "))
