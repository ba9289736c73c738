"""`gymgate serve-env`: an environment for OpenEnv clients, which own the agent's loop."""

from __future__ import annotations

from typing import Any

import click

from gymgate.cli.environments import stack_fields
from gymgate.cli.interrupts import serve_interruptibly
from gymgate.cli.listening import bound, url_address
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
from gymgate.cli.output import echo, log
from gymgate.core.config import StackConfig
from gymgate.core.errors import ConfigError


@click.command("serve-env")
@click.argument("environment", metavar="ENV")
@data_option
@config_option
@agent_option
@set_option
@env_var_option
@sandbox_option
@gym_option
@host_option
@port_option(8000)
@number_option(
    "--max-sessions", default=64, help="Clients that play at the same time; further ones are refused."
)
@seconds_option("--step-timeout", default=600.0, help="Seconds per tool call, step or scoring.")
@click.pass_context
def command(
    context: click.Context,
    /,
    environment: str,
    data: str,
    host: str,
    port: int,
    max_sessions: int,
    step_timeout: float,
    **_: Any,
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

    stack = StackConfig.model_validate(stack_fields(context, [environment]))
    (served,) = stack.environments
    packaged = open_catalog(stack.runtime, progress=log).find(environment, served.config)
    stepwise = stepwise_environment(packaged, packaged.config(served.config), served.agent)
    rows = open_rows(data, environment=packaged)
    if not len(rows):
        raise ConfigError(f"{rows.source} has no rows")
    with bound(host, port) as listener:

        def ready() -> None:
            echo(f"http://{url_address(listener)}")

        from gymgate.integrations.openenv.env_server import serve  # seconds, for what OpenEnv imports

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
