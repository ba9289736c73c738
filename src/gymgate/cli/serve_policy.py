"""`gymgate serve-policy`: start policy servers for a collection, wait for them, restart them, and end them."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from gymgate.cli.interrupts import INTERRUPTED
from gymgate.cli.options import DIRECTORY, OTHER, field_option, number_option, seconds_option
from gymgate.cli.output import echo, log
from gymgate.cluster.servers import PolicyServers, Server, gpus_here, sandbox_server, split_command
from gymgate.cluster.slurm_nodes import job_nodes
from gymgate.cluster.supervisor import ChildProcess, supervise
from gymgate.core.errors import ConfigError
from gymgate.core.http_client import LOOPBACK
from gymgate.core.task_groups import beside
from gymgate.stack.ports import HeldPort

UNFINISHED = 75
"""Exit code after SIGUSR1 (drain) before there was anything to drain."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 60.0
"""Time that the --run command has to end after TERM, when a server has failed or this process is ended."""


@click.command("serve-policy")
@click.argument("model", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGUMENT...]")
@field_option(OTHER, PolicyServers, "data_parallel")
@field_option(OTHER, PolicyServers, "replicas")
@field_option(OTHER, PolicyServers, "tensor_parallel")
@field_option(OTHER, PolicyServers, "command", metavar="COMMAND")
@click.option("--slurm-nodes", is_flag=True, help="Start them on every node of this Slurm job, with srun.")
@field_option(OTHER, PolicyServers, "srun", metavar="NAME[=VALUE]")
@field_option(OTHER, PolicyServers, "host", metavar="ADDRESS")
@field_option(OTHER, PolicyServers, "port", metavar="PORT")
@click.option(
    "--sandbox-command",
    "sandbox",
    metavar="COMMAND",
    help="Sandbox to start and keep running next to the servers.",
)
@click.option(
    "--sandbox-url",
    metavar="URL",
    help="Address that answers when the sandbox is ready, e.g. http://127.0.0.1:6000/health.",
)
@seconds_option("--start-timeout", default=1800.0, help="Seconds in which every server must answer.")
@number_option("--restarts", default=3, help="Restarts of each server within a day.", least=0)
@click.option("--logs", type=DIRECTORY, help="Directory for the servers' output.")
@click.option(
    "--run",
    "program",
    metavar="COMMAND",
    help="Run this command when every server answers, with {urls} replaced by their addresses; end when it ends.",
)
@click.option("--dry-run", is_flag=True, help="Print the servers' commands and addresses; start nothing.")
def command(
    sandbox: str | None,
    sandbox_url: str | None,
    slurm_nodes: bool,
    start_timeout: float,
    restarts: int,
    logs: Path | None,
    program: str | None,
    dry_run: bool,
    **policy: Any,
) -> None:
    """Serve a model with vLLM or another server; keep it up.

    MODEL is served with vLLM; --command starts another server. When every server answers, prints the addresses as
    `gymgate run -b` takes them, and runs until it is interrupted. With --run, it runs until that command ends and
    takes its exit code. A server that dies is restarted; when one has died too often, all servers are ended and the
    exit code is 1.
    """
    if bool(sandbox) != bool(sandbox_url):
        raise ConfigError(
            "give --sandbox-command and --sandbox-url together: a command, and the address it answers at"
        )
    with contextlib.ExitStack() as exits:
        servers: list[Server] = []
        if policy["model"] is not None or policy["command"] is not None or not sandbox:
            policy_servers = PolicyServers(nodes=job_nodes() if slurm_nodes else (), **policy)
            servers = _with_ports(policy_servers, exits)
        elif program is None:
            raise ConfigError("--sandbox-command alone serves no policy; add --run, or give a MODEL")
        else:
            _refuse_unused({**policy, "slurm_nodes": slurm_nodes})
        if sandbox and sandbox_url:
            servers.append(sandbox_server(sandbox, sandbox_url))
        urls = ",".join(server.url for server in servers if server.is_policy)
        child = _child(program, urls, sandbox_url) if program is not None else None
        if dry_run:
            for server in servers:
                variables = [f"{name}={shlex.quote(value)}" for name, value in server.environment]
                echo(" ".join([*variables, shlex.join(server.argv)]))
            echo(urls)
            return
        if logs is None:
            logs = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="gymgate-logs-")))
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--logs {logs} cannot be made: {error.strerror}") from error
        code = asyncio.run(_serve(servers, urls, logs, start_timeout, restarts, child))
    if code:
        raise click.exceptions.Exit(code)


def _refuse_unused(policy: dict[str, Any]) -> None:
    """Refuse options of policy servers where there are none."""
    flags = [
        "arguments after --" if name == "arguments" else f"--{name.replace('_', '-')}"
        for name, value in policy.items()
        if value
    ]
    if flags:
        raise ConfigError(
            f"{' and '.join(flags)}: there is no policy server to use it; give a MODEL, or --command"
        )


def _with_ports(policy_servers: PolicyServers, exits: contextlib.ExitStack) -> list[Server]:
    """The servers, each with a port that no other process can take."""
    gpus = gpus_here()
    if policy_servers.nodes:
        return policy_servers.servers(gpus)
    held = []
    for number in range(policy_servers.replicas or 1):
        port = policy_servers.port + number if policy_servers.port else 0
        try:
            options = socket.SO_REUSEADDR, socket.SO_REUSEPORT
            held.append(HeldPort(port, policy_servers.host or LOOPBACK, options=options))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used: {error.strerror}; choose another --port"
            ) from error
        exits.callback(held[-1].close)
    if policy_servers.command is not None:
        # vLLM can bind while the port is held; other servers may not, so their ports are only free just now.
        for held_port in held:
            held_port.close()
    return policy_servers.servers(gpus, [held_port.number for held_port in held])


def _child(program: str, urls: str, sandbox_url: str | None) -> ChildProcess:
    """The --run command, with the addresses in its arguments and variables."""
    argv = [argument.replace("{urls}", urls) for argument in split_command("--run", program)]
    if not argv:
        raise ConfigError("--run needs a command")
    variables = {"GYMGATE_POLICY_URLS": urls}
    if sandbox_url is not None:  # where NeMo Gym's servers look for a sandbox
        parts = urlsplit(sandbox_url)
        variables["NEMO_SKILLS_SANDBOX_HOST"] = parts.hostname or ""
        variables["NEMO_SKILLS_SANDBOX_PORT"] = str(parts.port or {"http": 80, "https": 443}[parts.scheme])
    return ChildProcess(argv, variables)


async def _run(child: ChildProcess) -> int:
    """Run the --run command; return its exit code, or 128 and the number of the signal that ended it."""
    try:
        await child.start()
    except OSError as error:
        raise ConfigError(f"--run: cannot run {error.filename!r}: {error.strerror}") from error
    try:
        code = await child.wait()
    finally:
        await child.stop(GRACE_S)
    return 128 - code if code < 0 else code


async def _serve(
    servers: Sequence[Server],
    urls: str,
    logs: Path,
    start_timeout: float,
    restarts: int,
    child: ChildProcess | None,
) -> int:
    """Serve until a signal, the end of `child`, or a server's error; return the exit code."""
    task = asyncio.current_task()
    assert task is not None
    code = INTERRUPTED

    def on_signal(number: signal.Signals) -> None:
        nonlocal code
        if child is not None and child.running:
            child.signal(number)
        elif number != signal.SIGUSR1 or child is not None:
            code = UNFINISHED if number == signal.SIGUSR1 else INTERRUPTED
            task.cancel()

    for number in FORWARDED:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        async with supervise(servers, logs, restarts=restarts, progress=log) as supervisor:
            await supervisor.ready(start_timeout)
            if child is None:
                echo(urls)
                await supervisor.watch()
                raise AssertionError("unreachable")
            async with beside([supervisor.watch()]):
                return await _run(child)
    except asyncio.CancelledError:
        return code
