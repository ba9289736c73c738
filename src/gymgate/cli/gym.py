"""`gymgate gym`: NeMo Gym's own command line in the managed runtime."""

from __future__ import annotations

import os
from typing import NoReturn

import click

from gymgate.cli.options import gym_option
from gymgate.cli.output import log
from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError


@click.command(
    name="gym", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@gym_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- ARGS...")
def command(gym: RuntimeConfig, arguments: tuple[str, ...]) -> NoReturn:
    """Run NeMo Gym's own command line.

    NeMo Gym is installed on first use. The command sees your environment variables, except for those that select another
    interpreter or virtual environment.

    \b
      gymgate gym -- --help
      gymgate gym -- list environments
    """
    from gymgate.gym.runtime import ensure_runtime
    from gymgate.gym.runtime.locks import inherit_locks_on_exec
    from gymgate.gym.runtime.uv import find_uv
    from gymgate.gym.runtime.variables import users_env

    runtime = ensure_runtime(gym, progress=log)
    program = runtime.python.with_name("gym")
    if not program.is_file():
        raise ConfigError(f"nemo-gym {runtime.version} at {runtime.python} has no command `gym`")
    inherit_locks_on_exec()
    os.execve(program, [str(program), *arguments], users_env(program.parent, find_uv().parent))
