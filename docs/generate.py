"""Fill the generated parts of the docs from docstrings: `python docs/generate.py` (`--check` only compares).

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a config class, `errors` or `commands`.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import click
from pydantic_core import PydanticUndefined

import gymgate.config
import gymgate.errors
from gymgate.cli import cli

PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def config_table(cls: type[gymgate.config.Config]) -> str:
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for name, field in cls.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{field.default!r}`"
        rows.append(
            f"| `{name}` | {default} | {' '.join((field.description or '').split())} |".replace("|  |", "| |")
        )
    return "\n".join([" ".join(inspect.cleandoc(cls.__doc__ or "").split()), "", *rows, ""])


def errors_tree() -> str:
    tree = inspect.cleandoc(gymgate.errors.__doc__ or "").partition("\n\n")[2].partition("\n\nA failed")[0]
    return f"```text\n{inspect.cleandoc(tree)}\n```\n"


def commands() -> str:
    context = click.Context(cli)
    lines = []
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        lines.append(f"| `gymgate {name}` | {command.get_short_help_str(200)} |")
    return "\n".join(["| command | what it does |", "| --- | --- |", *lines, ""])


def render(name: str) -> str:
    if name == "errors":
        return errors_tree()
    if name == "commands":
        return commands()
    return config_table(getattr(gymgate.config, name))


def main(check: bool) -> int:
    stale = []
    for page in sorted(Path(__file__).parent.glob("*.md")):
        text = page.read_text()
        filled = PART.sub(lambda part: part[1] + render(part[2]) + part[3], text)
        if filled != text:
            stale.append(page.name)
            if not check:
                page.write_text(filled)
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
