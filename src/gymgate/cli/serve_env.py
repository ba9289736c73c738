"""`gymgate serve-env`: an environment for OpenEnv clients, which own the agent's loop."""

from __future__ import annotations

import socket

import click

from gymgate.cli.environments import checked_env_vars, config_names, environment_configs
from gymgate.cli.interrupts import serve_interruptibly
from gymgate.cli.options import (
    agent_option,
    config_option,
    data_option,
    env_var_option,
    gym_option,
    host_option,
    number_option,
    port_option,
    sandbox_option,
    seconds_option,
    set_option,
)
from gymgate.cli.output import log
from gymgate.core.config import RuntimeConfig, StackConfig
from gymgate.core.errors import ConfigError


@click.command("serve-env")
@click.argument("environment", metavar="ENV")
@data_option
@config_option
@agent_option
@set_option
@env_var_option
@sandbox_option
@host_option
@port_option(8000)
@number_option(
    "--max-sessions", default=64, help="Clients that play at the same time; further ones are refused."
)
@seconds_option("--step-timeout", default=600.0, help="Seconds per tool call, step or scoring.")
@gym_option
def command(
    environment: str,
    data: str | None,
    config: tuple[str, ...],
    agent: str | None,
    settings: tuple[str, ...],
    env_vars: tuple[str, ...],
    sandbox: str | None,
    host: str,
    port: int,
    max_sessions: int,
    step_timeout: float,
    gym: RuntimeConfig,
) -> None:
    """Serve an environment to OpenEnv clients.

    The client owns the agent's loop: reset gives it a row's messages, a step is a tool call or a message of its model. In an
    environment with tools, the message is the final answer, which is scored; in a gymnasium environment, each step has a
    reward. Each client has its own NeMo Gym session. Prints the base URL when it is ready, and runs until it is
    interrupted. There is no authentication.
    """
    from gymgate.integrations.versions import require

    require("openenv")
    from gymgate.gym.row_sources import open_rows
    from gymgate.gym.runtime import open_catalog
    from gymgate.integrations.openenv.stepwise import stepwise_environment

    packaged = open_catalog(gym, progress=log).find(environment, config_names(config))
    stepwise = stepwise_environment(packaged, packaged.config(config_names(config)), agent)
    rows = open_rows(data or "example", environment=packaged)
    if not len(rows):
        raise ConfigError(f"{rows.source} has no rows")
    (served,) = environment_configs([environment], config, agent, settings, sandbox=sandbox)
    stack = StackConfig(environments=(served,), runtime=gym, env_vars=checked_env_vars(env_vars))
    with bound(host, port) as listener:

        def ready() -> None:
            click.echo(f"http://{url_address(listener)}")

        from gymgate.integrations.openenv.server import serve  # seconds, for what OpenEnv imports

        serve_interruptibly(
            serve(
                stack,
                stepwise,
                rows,
                listener=listener,
                max_sessions=max_sessions,
                timeout_s=step_timeout,
                ready=ready,
                progress=log,
            )
        )


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` for an address that cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # which repeats the address
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None


def url_address(listener: socket.socket) -> str:
    """Return a listener's address as URLs have it."""
    from gymgate.core.http_client import url_host

    host, port = listener.getsockname()[:2]
    return f"{url_host(host)}:{port}"
