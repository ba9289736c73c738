"""`gymgate serve-stack`: a stack of this machine for rollouts that other machines ask for."""

from __future__ import annotations

import os
import ssl
from typing import Any

import click

from gymgate.cli.environments import stack_fields
from gymgate.cli.interrupts import serve_interruptibly
from gymgate.cli.listening import bound, url_address
from gymgate.cli.options import (
    SERVED_OPTIONS,
    add_options,
    judge_key_var_option,
    judge_option,
    port_option,
)
from gymgate.cli.output import echo, log
from gymgate.core.config import StackConfig, StackServer
from gymgate.core.errors import ConfigError


@click.command("serve-stack")
@click.argument("environments", nargs=-1, required=True, metavar="ENV...")
@add_options(SERVED_OPTIONS)
@judge_option
@judge_key_var_option
@port_option(7411)
@click.option(
    "--stack-token-var",
    "token_var",
    default=StackServer.model_fields["token_env"].default,
    show_default=True,
    metavar="NAME",
    help="Environment variable with the token that callers must have: at least 16 characters.",
)
@click.option("--certificate", type=click.Path(), metavar="FILE", help="Certificate chain for TLS (PEM).")
@click.option("--key", type=click.Path(), metavar="FILE", help="Private key of the certificate (PEM).")
@click.pass_context
def command(
    context: click.Context,
    /,
    environments: tuple[str, ...],
    host: str,
    port: int,
    token_var: str,
    certificate: str | None,
    key: str | None,
    **_: Any,
) -> None:
    """Serve a stack to other machines.

    Whoever has the token runs rollouts in these environments, with policies at HTTP endpoints that this machine reaches.
    Prints the URL for StackConfig's `server` when it is ready, and runs until it is interrupted. Without a certificate it
    listens on loopback only.
    """
    from gymgate.stack.stack_server import serve_stack

    if not (token := os.environ.get(token_var)):
        raise ConfigError(f"environment variable {token_var!r} is not set (--stack-token-var)")
    tls = _tls(certificate, key)
    stack = StackConfig.model_validate(stack_fields(context, environments))
    with bound(host, port) as listener:
        url = f"gymgate{'s' if tls else ''}://{url_address(listener)}"
        serve_interruptibly(serve_stack(stack, listener, token, tls, lambda: echo(url), log))


def _tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise ConfigError(f"--key {key} needs its certificate: --certificate FILE")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--certificate {certificate}, --key {key}: {reason}") from None
    return context
