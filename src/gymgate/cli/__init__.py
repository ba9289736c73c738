"""The `gymgate` command. Each of its commands is a module of this package, imported when it is called."""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import sys
from typing import Any

import click

from gymgate.core.errors import GymgateError, OptionError, printable

_FULL_OR_TOO_LONG = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG})
COMMANDS = {
    "Rollouts": ("run", "eval"),
    "Environments": ("list", "info", "data", "check", "init"),
    "Results": ("aggregate", "compare", "report", "view", "export"),
    "This machine": ("ps", "logs", "stop", "doctor"),
    "Advanced": (
        *("rescore", "slurm", "setup", "cache", "gym"),
        *("serve", "serve-policy", "serve-env"),
    ),
}
"""Commands by task, as `--help` lists them. Each is the `command` of its module in `gymgate.cli`."""
ADVANCED = "Advanced"
"""The task whose commands `--help` only names."""


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is needed, and lists commands by task."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in COMMANDS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"gymgate.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, names = args[0], self.list_commands(ctx)
        if not (name in names or name.startswith("-") or ctx.resilient_parsing):
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tasks = {task: names for task, names in COMMANDS.items() if task != ADVANCED}
        width = max(len(name) for names in tasks.values() for name in names)
        for task, names in tasks.items():
            formatter.write(f"\n{task}:\n")
            for name in names:
                command = self.get_command(ctx, name)
                assert command is not None
                text = command.get_short_help_str(formatter.width - width - 4)
                formatter.write(f"  {name:<{width}}  {text}\n")
        served = [name for name in COMMANDS[ADVANCED] if name.startswith("serve")]
        others = [name for name in COMMANDS[ADVANCED] if name not in served]
        formatter.write(f"\n{ADVANCED} (gymgate COMMAND --help):\n  {', '.join(others)}\n")
        formatter.write(f"  {', '.join(served)}\n")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="gymgate")
def cli() -> None:
    """Run NVIDIA NeMo Gym environments from any eval or RL SDK.

    To begin, without a model: gymgate run mcqa -r 4
    """


def main(argv: list[str] | None = None) -> Any:
    """Run a command line; ends with one line on stderr and exit code 1 for a `GymgateError`, 2 for an option's value of the
    wrong form, 130 for Ctrl-C."""
    _accept_any_stdout()
    try:
        # With `standalone_mode=False` click returns the code of an `Exit` instead of a result.
        result = cli.main(args=argv, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "gymgate"
        text = " ".join(error.format_message().split())
        if text.startswith("Usage: "):  # a group without a command shows its help
            error.show()
        else:
            click.echo(f"{path}: {printable(text).rstrip('.')} ({path} --help)", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except GymgateError as error:
        click.echo(f"gymgate: {error}{_where_explained(str(error), argv)}", err=True)
        sys.exit(2 if isinstance(error, OptionError) else 1)
    except OSError as error:
        if error.errno == errno.EMFILE:
            click.echo(f"gymgate: {printable(error.strerror or '')}; raise `ulimit -n`", err=True)
            sys.exit(1)
        if error.errno not in _FULL_OR_TOO_LONG:
            raise
        where = printable(str(error.filename or "the output")[:80])
        click.echo(f"gymgate: {where}: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer has no place to go
        sys.exit(1)
    except ValueError as error:
        from gymgate.core.config import refused_by_config

        if (line := refused_by_config(error)) is None:
            raise
        click.echo(f"gymgate: {printable(line)}", err=True)
        sys.exit(2)
    except RuntimeError as error:
        if "home directory" not in str(error):  # `Path.expanduser`
            raise
        click.echo(f"gymgate: {error} A path begins with ~ and a name that no user here has.", err=True)
        sys.exit(1)
    if isinstance(result, int) and result:
        sys.exit(result)
    return result


def _where_explained(message: str, argv: list[str] | None) -> str:
    """Return where the options that a message names are explained, if the called command's `--help` leaves one of them out."""
    from gymgate.cli.options import GroupedCommand

    command: click.Command | None = cli
    path = "gymgate"
    for word in sys.argv[1:] if argv is None else argv:
        if isinstance(command, click.Group):
            command, path = command.get_command(click.Context(command), word), f"{path} {word}"
    return command.where_explained(message, path) if isinstance(command, GroupedCommand) else ""


def _accept_any_stdout() -> None:
    """Print what the encoding of stdout lacks, such as `±`, as `?`, and to a stdout that is closed nothing."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
