"""`gymgate serve`: recorded rollouts as a policy that any OpenAI-compatible client can call."""

from __future__ import annotations

import click

from gymgate.cli.interrupts import serve_interruptibly
from gymgate.cli.options import gym_option, host_option, number_option, port_option, replay_file_option
from gymgate.cli.output import echo, log
from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.runs.collected.policies import replay_files
from gymgate.runs.collected.replay_server import recording_files, serve


@click.command("serve")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@replay_file_option
@number_option("--index", help="Answer only from recording N, counted from 0.", least=0)
@host_option
@port_option(0)
@gym_option
def command(
    environments: tuple[str, ...],
    files: tuple[str, ...],
    index: int | None,
    host: str,
    port: int,
    gym: RuntimeConfig,
) -> None:
    """Serve recorded rollouts as a policy.

    It answers chat-completions, Responses and Anthropic messages calls, plain and streamed, with the rollouts recorded for
    ENV. Prints its base URL when it is ready, and runs until it is interrupted. Any API key is accepted.
    """
    if not environments and not files:
        raise ConfigError("give an environment to serve its recorded rollouts, or --replay-file FILE")
    replayed = replay_files(files)  # refused, if wrong, before NeMo Gym is installed
    paths = [*recording_files(environments, gym, log), *replayed]
    serve_interruptibly(serve(paths, echo, index=index, host=host, port=port))
