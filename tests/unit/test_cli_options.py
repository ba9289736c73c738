"""All commands together: options of one name mean the same, and the list of commands fits a screen."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from gymgate.cli import COMMANDS, cli, main
from gymgate.cli.output import log
from gymgate.cli.rollout_commands import showing_run

OWN_TEXT = {
    *(
        "--output",
        "--rows",
        "--all",
        "--dry-run",
    ),  # rows are run or written; what all are depends on the command
    *("--seeds", "--model", "--data", "--env", "--agent", "--config", "--host", "--port"),
}
"""Options whose help and default say what they are in each command."""
OWN_DEFAULT = {"--timeout", "--start-timeout"}
OWN_TYPE = {"--output", "--port"}
"""A file or a directory, one or several; 0 is a port where a free one may be taken."""
SHORT = {
    "-o": "--output",
    "-n": "--rows",
    "-r": "--repeats",
    "-c": "--concurrency",
    "-b": "--base-url",
    "-m": "--model",
    "-k": "--ks",
    "-f": "--follow",
}
ELSEWHERE = {("logs", "-n"): "--lines"}
"""Letters that another program has made a habit of: `tail`."""
FLAGS = {"--json", "--dry-run", "--all"}


def commands(group: click.Group = cli, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


def options() -> dict[str, dict[str, click.Option]]:
    """Long name -> command -> its option of that name."""
    found: defaultdict[str, dict[str, click.Option]] = defaultdict(dict)
    for path, command in commands():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                names = [name for name in parameter.opts if name.startswith("--")]
                assert len(names) == 1, f"{path} {parameter.opts}"
                found[names[0]][path] = parameter
    return dict(found)


def meaning(name: str, option: click.Option) -> dict[str, Any]:
    """What must agree wherever the option is."""
    found: dict[str, Any] = {"short": sorted(option.opts), "flag": option.is_flag}
    if name not in OWN_TYPE:
        found |= {"type": option.type.to_info_dict(), "multiple": option.multiple}
    if name not in OWN_TEXT:
        found |= {"help": option.help, "metavar": option.metavar}
        if name not in OWN_DEFAULT:
            found |= {"default": option.default}
    return found


@pytest.mark.parametrize("name", sorted(options()))
def test_an_option_means_the_same_in_every_command(name: str) -> None:
    meanings = {path: meaning(name, option) for path, option in options()[name].items()}
    first, *others = meanings
    assert {path: meanings[path] for path in others} == dict.fromkeys(others, meanings[first]), first


@pytest.mark.parametrize(("short", "name"), SHORT.items())
def test_a_letter_stands_for_one_option(short: str, name: str) -> None:
    for path, command in commands():
        for parameter in command.params:
            meant = ELSEWHERE.get((path, short), name)
            assert (short in parameter.opts) == (meant in parameter.opts), f"{path}: {parameter.opts}"


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_flags_are_flags_everywhere(name: str) -> None:
    assert all(option.is_flag for option in options()[name].values())


def test_every_option_says_what_it_is() -> None:
    silent = [
        (path, name)
        for name, found in options().items()
        for path, option in found.items()
        if not (option.help or option.hidden)
    ]
    assert silent == []


def test_the_list_of_commands_fits_a_screen() -> None:
    lines = CliRunner().invoke(cli, ["--help"], terminal_width=80).output.splitlines()
    assert len(lines) <= 45
    assert [line for line in lines if line.endswith("...") and not line.startswith("Usage")] == []
    assert max(map(len, lines)) <= 80
    described = [line for line in lines if re.match(r"  [a-z][\w-]*  ", line)]
    assert len(described) == 16
    assert all(re.search(rf"\b{name}\b", "\n".join(lines)) for name in COMMANDS["Advanced"])


@pytest.mark.parametrize("name", ["run", "check", "rescore", "eval run"])
def test_help_lists_the_options_of_a_first_run_and_says_where_all_are(name: str) -> None:
    short, whole = (
        CliRunner().invoke(cli, [*name.split(), option], prog_name="gymgate", terminal_width=80).output
        for option in ("--help", "--help-all")
    )
    parameters = dict(commands())[name].params
    own = {parameter.opts[-1] for parameter in parameters if isinstance(parameter, click.Option)}
    own -= {"--help-all"}
    listed = [{*re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)} for text in (short, whole)]
    shown = own & listed[0]
    assert 12 < len(shown) <= 18
    assert own <= listed[1]
    assert f"\n{len(own - shown)} more options: gymgate {name} --help-all\n" in short
    completion = BashComplete(cli, {}, "gymgate", "_GYMGATE_COMPLETE")
    assert own <= {item.value for item in completion.get_completions(name.split(), "--")}


@pytest.mark.parametrize(
    ("name", "arguments", "is_hidden"),
    [
        ("run", ["mcqa", "--retries", "x=1", "-o", "x"], True),
        ("run", ["mcqa", "--judge", "x"], False),
        ("eval run", ["--gym", "x"], True),
        ("check", ["mcqa", "--rows-file", "x"], True),
        ("check", ["mcqa", "--judge", "x"], False),
    ],
)
def test_a_message_that_names_an_option_outside_of_help_says_where_it_is(
    name: str, arguments: list[str], is_hidden: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*name.split(), *arguments])
    [line] = capsys.readouterr().err.splitlines()
    assert next(each for each in arguments if each.startswith("--")) in line
    assert (f"gymgate {name} --help-all" in line) == is_hidden


@pytest.mark.parametrize(("option", "is_hidden"), [("--agent-processes", True), ("--timeout", False)])
def test_so_does_a_line_of_a_run(
    option: str, is_hidden: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = dict(commands())["run"]
    with command.make_context("run", ["mcqa"]), showing_run() as (_, progress_log):
        for write in (log, progress_log):
            write(f"raise {option}")
    lines = capsys.readouterr().err.splitlines()
    assert [("run --help-all" in line, option in line) for line in lines] == [(is_hidden, True)] * 2


@pytest.mark.parametrize(
    ("field", "near"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("top-p", "top_p"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("temperature", None),
        ("top_k", None),
        ("min_p", None),
        ("chat_template_kwargs", None),
        ("repeat_last_n", None),
        ("an_option_of_theirs", None),
    ],
)
@pytest.mark.parametrize("name", ["run", "check", "eval run"])
def test_a_mistyped_field_of_a_call_is_warned_of_and_kept(
    field: str, near: str | None, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with dict(commands())[name].make_context(name, ["mcqa", "--sampling", f"{field}=1"]) as context:
        assert context.params["sampling"] == {field: 1}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(near)
    assert all(line.startswith("warning: ") and field in line and str(near) in line for line in lines)


@pytest.mark.parametrize(("name", "near"), [("rnu", "run"), ("cmpare", "compare"), ("wholly-other", None)])
def test_an_unknown_command_is_refused_with_a_near_one(name: str, near: str | None) -> None:
    done = CliRunner().invoke(cli, [name])
    assert done.exit_code == 2
    line = done.output.splitlines()[-1]
    assert repr(name) in line
    assert line.endswith(f"{near}?" if near else ".")


@pytest.mark.parametrize("command", ["run --data", "eval run --data", "run -b", "check --base-url"])
def test_what_would_drop_the_first_of_two_values_is_refused(command: str) -> None:
    words = command.split()
    done = CliRunner().invoke(cli, [*words, "http://a/v1", words[-1], "http://b/v1"])
    assert done.exit_code == 2, done.output
    assert "2 times" in done.output
