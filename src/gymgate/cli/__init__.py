"""The `gymgate` command. Each subcommand lives in a module of its own, imported when it is called."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from gymgate.errors import GymgateError

COMMANDS = {
    "list": "list",
    "info": "info",
    "setup": "setup",
    "cache": "cache",
    "doctor": "doctor",
    "check": "check",
    "data": "data",
    "run": "run",
    "collect": "collect",
    "aggregate": "aggregate",
    "report": "report",
    "slurm": "slurm",
    "serve-policy": "serve_policy",
    "serve": "serve",
    "eval": "eval",
}
"""Subcommand -> module under `gymgate.cli` whose `command` it is."""


class LazyGroup(click.Group):
    """A group that imports a subcommand's module when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gymgate.cli.{COMMANDS[cmd_name]}")
        command: click.Command = module.command
        return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="gymgate")
def cli() -> None:
    """Run NVIDIA NeMo Gym environments from any eval or RL SDK."""


def main(argv: list[str] | None = None) -> Any:
    """Console entry point: one line on stderr and exit code 1 for any `GymgateError`, 130 for Ctrl-C."""
    try:
        # Outside of its standalone mode click returns the code of an `Exit` where a command's result is due.
        result = cli.main(args=argv, standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except GymgateError as error:
        click.echo(f"gymgate: {error}", err=True)
        sys.exit(1)
    except ValueError as error:
        if (line := _invalid_config(error)) is None:
            raise
        click.echo(f"gymgate: {line}", err=True)
        sys.exit(1)
    if isinstance(result, int) and result:
        sys.exit(result)
    return result


def _invalid_config(error: ValueError) -> str | None:
    """One line on a config that an option's value does not fit; `None` for any other error."""
    from pydantic import ValidationError

    from gymgate.config import Config

    if not isinstance(error, ValidationError) or error.title not in {
        cls.__name__ for cls in Config.__subclasses__()
    }:
        return None
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    )
