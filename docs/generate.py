"""Fill the generated parts of the docs from docstrings: `python docs/generate.py` (`--check` only compares).

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. NAME is a config class, `errors`, `commands`, or a title of
commands with `-` for each space, such as `This-machine`.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

import click
from pydantic_core import PydanticUndefined

import gymgate.config
import gymgate.errors
from gymgate.cli import COMMANDS, cli

PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def config_table(cls: type[gymgate.config.Config]) -> str:
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for name, field in cls.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{field.default!r}`"
        rows.append(
            f"| `{name}` | {default} | {' '.join((field.description or '').split())} |".replace("|  |", "| |")
        )
    return "\n".join([" ".join(inspect.cleandoc(cls.__doc__ or "").split()), "", *rows, ""])


def errors_tree() -> str:
    doc = inspect.cleandoc(gymgate.errors.__doc__ or "")
    tree = doc.partition("\n\n")[2].partition("\n\nA failed")[0]
    return f"```text\n{textwrap.dedent(tree)}\n```\n"


def commands_table() -> str:
    """A table of all commands, by task."""
    lines = []
    for task, names in COMMANDS.items():
        for name in names:
            command = command_at(name)
            link = f"[`gymgate {name}`](#gymgate-{name})"
            lines.append(f"| {link} | {command.get_short_help_str(200)} | {task.lower()} |")
    return "\n".join(["| command | what it does | for |", "| --- | --- | --- |", *lines, ""])


def command_at(*names: str) -> click.Command:
    command: click.Command = cli
    for name in names:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None, name
        command = found
    return command


def commands_of(task: str) -> str:
    """Usage, text and options of each of the task's commands, and of their subcommands."""
    paths: list[tuple[str, ...]] = []
    for name in COMMANDS[task]:
        command = command_at(name)
        paths.append((name,))
        if isinstance(command, click.Group):
            paths += [(name, each) for each in command.list_commands(click.Context(command))]
    return "\n".join(described(path) for path in paths)


def described(path: tuple[str, ...]) -> str:
    command = command_at(*path)
    name = " ".join(("gymgate", *path))
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    help_text = inspect.cleandoc(command.help or "")
    blocks = [paragraph(block) for block in re.split(r"\n\s*\n", help_text)]
    lines = [f"{'#' * (len(path) + 2)} {name}", "", f"```text\n{usage}\n```", "", "\n\n".join(blocks), ""]
    options = [
        record
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option) and parameter.name != "help"
        if (record := parameter.get_help_record(context)) is not None
    ]
    if options:
        lines += ["| option | meaning |", "| --- | --- |"]
        lines += [f"| `{cell(flags)}` | {cell(text)} |" for flags, text in options]
        lines.append("")
    if command.epilog:
        lines += [paragraph(inspect.cleandoc(command.epilog)), ""]
    return "\n".join(lines)


def paragraph(text: str) -> str:
    """A paragraph of a command's help: its lines joined, or as code where it begins with click's mark for that."""
    if text.startswith("\b"):
        return f"```bash\n{textwrap.dedent(text.partition(chr(10))[2])}\n```"
    return " ".join(text.split()).replace("*", r"\*")


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def render(name: str) -> str:
    if name == "errors":
        return errors_tree()
    if name == "commands":
        return commands_table()
    if (task := name.replace("-", " ")) in COMMANDS:
        return commands_of(task)
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
