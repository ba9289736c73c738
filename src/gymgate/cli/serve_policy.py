"""`gymgate serve-policy`: policy servers for a collection, started, waited for, looked after and ended."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from gymgate.cli.interrupts import INTERRUPTED
from gymgate.cli.options import Seconds
from gymgate.errors import ConfigError
from gymgate.serving.program import Program
from gymgate.serving.servers import PolicyServers, Server, gpus_here, sandbox_server
from gymgate.serving.slurm_nodes import job_nodes
from gymgate.serving.supervisor import alone, supervise
from gymgate.stack.ports import LOOPBACK, HeldPort

UNFINISHED = 75
"""Asked to drain (SIGUSR1) before there was anything to drain."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@click.command("serve-policy")
@click.argument("model", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGUMENT...]")
@click.option(
    "--data-parallel", type=click.IntRange(1), help="Copies behind one address, by vLLM's own option."
)
@click.option(
    "--replicas", type=click.IntRange(1), help="Servers per node, each with GPUs and an address of its own."
)
@click.option("--tensor-parallel", type=click.IntRange(1), help="GPUs per copy.")
@click.option(
    "--command",
    metavar="TEXT",
    help="Another server in vLLM's place, such as 'python -m sglang.launch_server --model-path M --port {port}'.",
)
@click.option("--slurm-nodes", is_flag=True, help="Start them on every node of this Slurm job, with srun.")
@click.option(
    "--srun", multiple=True, metavar="NAME[=VALUE]", help="Further srun option, such as container-image=X."
)
@click.option("--host", help="Address to listen on. [127.0.0.1; every one with --slurm-nodes]")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="The first port. [free ones; 8000 with --slurm-nodes]"
)
@click.option("--sandbox", metavar="COMMAND", help="Program to start and look after beside them.")
@click.option(
    "--sandbox-url", metavar="URL", help="Answers when that is ready, such as http://127.0.0.1:6000/health."
)
@click.option(
    "--wait",
    type=Seconds(0, min_open=True),
    default=1800.0,
    show_default=True,
    help="Seconds until all must answer.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Times that a server is started again.",
)
@click.option(
    "--logs", type=click.Path(path_type=Path, file_okay=False), help="Directory of the servers' output."
)
@click.option(
    "--run",
    "program",
    metavar="COMMAND",
    help="Run it when all answer, {urls} in it their addresses; end with it.",
)
@click.option("--dry-run", is_flag=True, help="Print the servers' commands and addresses; start nothing.")
def command(
    model: str | None,
    arguments: tuple[str, ...],
    data_parallel: int | None,
    replicas: int | None,
    tensor_parallel: int | None,
    command: str | None,
    slurm_nodes: bool,
    srun: tuple[str, ...],
    host: str | None,
    port: int | None,
    sandbox: str | None,
    sandbox_url: str | None,
    wait: float,
    restarts: int,
    logs: Path | None,
    program: str | None,
    dry_run: bool,
) -> None:
    """Serve MODEL with vLLM, or start another server with --command, and keep it up.

    Prints the addresses, as gymgate collect -b takes them, when every server answers; runs until it is interrupted,
    or with --run until that command ends, whose exit code it takes. A server that dies is started again; one that
    dies too often ends it all with code 1.
    """
    if bool(sandbox) != bool(sandbox_url):
        raise ConfigError("--sandbox and --sandbox-url belong together: a command, and where it answers")
    only_sandbox = bool(sandbox) and model is None and command is None
    with contextlib.ExitStack() as exits:
        servers: list[Server] = []
        if not only_sandbox:
            wanted = PolicyServers(
                model=model,
                arguments=arguments,
                command=command,
                data_parallel=data_parallel,
                replicas=replicas,
                tensor_parallel=tensor_parallel,
                nodes=job_nodes() if slurm_nodes else (),
                srun=srun,
                host=host,
                port=port,
            )
            servers = _with_ports(wanted, exits)
        elif program is None:
            raise ConfigError("--sandbox alone has nobody to serve; add --run, or name a MODEL")
        else:
            _refuse_idle(
                {
                    "arguments after --": arguments,
                    "--data-parallel": data_parallel,
                    "--replicas": replicas,
                    "--tensor-parallel": tensor_parallel,
                    "--slurm-nodes": slurm_nodes,
                    "--srun": srun,
                    "--host": host,
                    "--port": port,
                }
            )
        if sandbox and sandbox_url:
            servers.append(sandbox_server(sandbox, sandbox_url))
        urls = ",".join(server.url for server in servers if server.is_policy)
        child = Program(program, urls, servers) if program is not None else None
        if dry_run:
            _print_plan(servers, urls)
            return
        if logs is None:
            logs = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="gymgate-logs-")))
        _make(logs)
        code = asyncio.run(_serve(servers, urls, logs, wait, restarts, child))
    if code:
        raise click.exceptions.Exit(code)


def _refuse_idle(given: Mapping[str, object]) -> None:
    """Options of policy servers, where there are none."""
    if idle := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"{' and '.join(idle)}: there is no policy server for it; name a MODEL, or --command"
        )


def _make(logs: Path) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {logs} cannot be made: {error.strerror}") from error


def _with_ports(wanted: PolicyServers, exits: contextlib.ExitStack) -> list[Server]:
    """The servers, each with a port that nobody else can take."""
    gpus = gpus_here()
    if wanted.nodes:
        return wanted.servers(gpus)
    count = wanted.replicas or 1
    numbers = [wanted.port + number if wanted.port else 0 for number in range(count)]
    held = []
    for number in numbers:
        try:
            port = HeldPort(number, wanted.host or LOOPBACK, option=socket.SO_REUSEPORT)
        except OSError as error:
            raise ConfigError(
                f"port {number} cannot be used: {error.strerror}; name another --port"
            ) from error
        exits.callback(port.close)
        held.append(port)
    if wanted.command is not None:
        # vLLM binds with SO_REUSEPORT and so beside us; others cannot, and get ports that were free just now.
        for port in held:
            port.close()
    return wanted.servers(gpus, [port.number for port in held])


def _print_plan(servers: Sequence[Server], urls: str) -> None:
    for server in servers:
        variables = [f"{name}={shlex.quote(value)}" for name, value in server.environment]
        click.echo(" ".join([*variables, shlex.join(server.argv)]))
    click.echo(urls)


async def _serve(
    servers: Sequence[Server], urls: str, logs: Path, wait: float, restarts: int, child: Program | None
) -> int:
    """Until a signal, the end of `child`, or an error of a server's; the exit code."""
    task = asyncio.current_task()
    assert task is not None
    ready, code = False, INTERRUPTED

    def on_signal(number: signal.Signals) -> None:
        nonlocal code
        if child is not None and child.running:
            child.send(number)
        elif number != signal.SIGUSR1 or child is not None:
            code = UNFINISHED if number == signal.SIGUSR1 else INTERRUPTED
            task.cancel()

    for number in FORWARDED:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        async with supervise(servers, logs, restarts=restarts, say=_say) as supervisor:
            await supervisor.ready(wait)
            ready = True
            if child is None:
                click.echo(urls)
                await supervisor.watch()
                raise AssertionError("unreachable")
            async with alone([supervisor.watch()]):
                return await child.run()
    except asyncio.CancelledError:
        return 0 if ready and child is None else code


def _say(message: str) -> None:
    click.echo(message, err=True)
