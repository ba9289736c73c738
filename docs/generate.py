"""Fill the generated parts of the docs from docstrings: `python docs/generate.py` (`--check` only compares).

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. NAME is `home` (the README's first screens), `code`,
`errors`, `commands`, `settings` (of an eval), `skyrl`, `trl`, `verl`, a title of commands with `-` for each space, such as
`This-machine`, or a public name of gymgate: a config class, another class or a function.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import environment_pages
import index
from pydantic import BaseModel

import gymgate
import gymgate.core.config
import gymgate.core.errors
from gymgate.cli import COMMANDS, cli
from gymgate.cli.options import GROUPS, GroupedCommand
from gymgate.gym.catalog.needs import code_places
from gymgate.integrations.eval_options import EvalOptions
from gymgate.integrations.skyrl.engine import GeneratorSettings
from gymgate.integrations.trl.spec import TRLSettings
from gymgate.integrations.verl.worker import LoopConfig
from gymgate.quality import CheckResult

SETTINGS = {"settings": EvalOptions, "skyrl": GeneratorSettings, "trl": TRLSettings, "verl": LoopConfig}
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def config_table(cls: type[BaseModel], title: str = "field") -> str:
    """The class's docstring, and a line for each field."""
    rows = [f"| {title} | default | meaning |", "| --- | --- | --- |"]
    fields = sorted(cls.model_fields.items(), key=lambda item: not item[1].is_required())
    for name, field in fields:
        value = field.get_default(call_default_factory=True)
        default = "required" if field.is_required() else f"`{value!r}`"
        if isinstance(value, gymgate.core.config.Config):
            arguments = ", ".join(
                f"{key}={item!r}" for key, item in value.model_dump(exclude_defaults=True).items()
            )
            default = f"`{type(value).__name__}({arguments})`"
        rows.append(
            f"| `{name}` | {default} | {' '.join((field.description or '').split())} |".replace("|  |", "| |")
        )
    return "\n".join([" ".join(inspect.cleandoc(cls.__doc__ or "").split()), "", *rows, ""])


def errors_tree() -> str:
    doc = inspect.cleandoc(gymgate.core.errors.__doc__ or "")
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
    groups: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        if not isinstance(parameter, click.Option) or {"--help", "--help-all"} & {*parameter.opts}:
            continue
        if (record := parameter.get_help_record(context)) is not None:
            group = getattr(parameter, "group", "") if isinstance(command, GroupedCommand) else ""
            groups.setdefault(group, []).append("| `{}` | {} |".format(*map(cell, record)))
    for group in sorted(groups, key=(*GROUPS, "").index):
        lines += [f"| {group or 'option'} | meaning |", "| --- | --- |", *groups[group], ""]
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


def record_table(cls: type) -> str:
    """Fields of a record, with the text that stands under each in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = ["| field | type | meaning |", "| --- | --- | --- |"]
    for statement, following in pairwise([*body.body, ast.Pass()]):
        name, kind = "", ""
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name, kind = statement.target.id, ast.unparse(statement.annotation)
        elif isinstance(statement, ast.FunctionDef) and any(
            isinstance(each, ast.Name) and each.id == "property" for each in statement.decorator_list
        ):
            name, kind = statement.name, ast.unparse(statement.returns) if statement.returns else ""
        if not name or name.startswith("_"):
            continue
        text = ast.get_docstring(statement) if isinstance(statement, ast.FunctionDef) else None
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = str(following.value.value)
        lines.append(f"| `{name}` | `{cell(kind)}` | {cell(text or '')} |".replace("|  |", "| |"))
    return "\n".join([" ".join((inspect.getdoc(cls) or "").split()), "", *lines, ""])


def signature(name: str, function: Callable[..., Any]) -> str:
    """A call with its parameters, one a line where they do not fit on one."""
    found = inspect.signature(function)
    parameters = []
    keyword_only = False
    for each in found.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parameters.append("*")
        star = "*" if each.kind is each.VAR_POSITIONAL else ""
        keyword_only |= bool(star)
        default = "" if each.default is each.empty else f" = {shown(each.default)}"
        parameters.append(f"{star}{each.name}: {each.annotation}{default}")
    line = f"{name}({', '.join(parameters)}) -> {found.return_annotation}"
    if len(line) <= 100:
        return line
    inner = "".join(f"    {each},\n" for each in parameters)
    return f"{name}(\n{inner}) -> {found.return_annotation}"


def shown(default: object) -> str:
    return "..." if callable(default) else repr(default)


def function_text(name: str, function: Callable[..., Any]) -> str:
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    return f"```text\n{signature(name, function)}\n```\n\n{text}\n"


def class_text(cls: type) -> str:
    """A class by its public methods and properties."""
    parts = [" ".join((inspect.getdoc(cls) or "").split()), ""]
    for name, member in vars(cls).items():
        if isinstance(member, property) and not name.startswith("_"):
            text = " ".join((inspect.getdoc(member) or "").split())
            parts += [f"```text\n{cls.__name__}.{name}\n```", "", text, ""]
        elif inspect.isfunction(member) and not name.startswith("_"):
            parts.append(function_text(f"{cls.__name__}.{name}", member))
    return "\n".join(parts)


def home() -> str:
    """The README up to its installation, with links that hold within the site."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    return text.partition("\n## Install")[0].replace("](docs/", "](") + "\n"


def code_table() -> str:
    """The servers and agents that run code of an answer or a row, with what was read of them."""
    sources = {"answer": "the model writes", "row": "rows hold"}
    lines = ["| server or agent | runs code that | how |", "| --- | --- | --- |"]
    for server, files in code_places().items():
        read = [place for place in files.values() if sources.keys() & {*place["reached"]}]
        what = [text for source, text in sources.items() if any(source in place["reached"] for place in read)]
        how = "; ".join(dict.fromkeys(place["why"] for place in read))
        lines += [f"| `{server}` | {', '.join(what)} | {cell(how)} |"] if read else []
    places = [place for files in code_places().values() for place in files.values()]
    count = sum(len(place["lines"]) for place in places)
    others = (
        f"{count} places were read. The others run code of an answer or a row only in a container or a sandbox service, or not "
        "at all, as far as the release's own files show."
    )
    return "\n".join([*lines, "", others, ""])


def render(name: str) -> str:
    if name == "home":
        return home()
    if name == "code":
        return code_table()
    if name == "errors":
        return errors_tree()
    if name == "commands":
        return commands_table()
    if name in SETTINGS:
        return config_table(SETTINGS[name], "setting")
    if (task := name.replace("-", " ")) in COMMANDS:
        return commands_of(task)
    found = getattr(gymgate, name)
    if not inspect.isclass(found):
        return function_text(f"gymgate.{name}", found)
    if issubclass(found, gymgate.core.config.Config):
        return config_table(found)
    return record_table(found) if is_dataclass(found) or issubclass(found, BaseModel) else class_text(found)


def main(check: bool) -> int:
    stale = []
    docs = Path(__file__).parent
    for page in sorted([*docs.glob("*.md"), *docs.parent.glob("environments/*/README.md")]):
        text = page.read_text()
        filled = PART.sub(lambda part: part[1] + render(part[2]) + part[3], text)
        if filled != text:
            stale.append(page.name)
            if not check:
                page.write_text(filled)
    made = [
        ("record.schema.json", json.dumps(CheckResult.model_json_schema(), indent=1) + "\n"),
        ("index.schema.json", index.schema()),
        *environment_pages.overviews(),
    ]
    for name, text in made:
        path = Path(__file__).parent / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
