"""`gymgate logs`: what the servers of a running stack print."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymgate.cli.stack_commands import NONE
from gymgate.core.errors import ConfigError, OptionError, printable

if TYPE_CHECKING:
    from gymgate.stack.client.daemons import DaemonProcess
    from gymgate.stack.logs import LogReader

LOOK_S = 0.25
"""Between two looks at the logs that are followed."""


@click.command("logs")
@click.argument("names", nargs=-1, metavar="[STACK] [SERVER]")
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the stack ends or Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only the last N lines of each log that is there. [all]",
)
def command(names: tuple[str, ...], follow: bool, lines: int | None) -> None:
    """Print the logs of a stack's servers.

    STACK is the pid that `gymgate ps` shows; it can be left out while one stack of this cache runs. SERVER is the name of a
    log: a server's, `daemon`, a fork server's, or `config`, NeMo Gym's parser. Without it all are printed, each line after the
    name of its log.
    A log keeps its last 2 to 8 MiB.

    \b
    gymgate logs
    gymgate logs 12345 mcqa_simple_agent -f
    """
    from gymgate.stack.logs import named_logs

    stack, server = _parse(names)
    daemon = _choose(stack)
    logs = named_logs(daemon.command.directory)
    if server is not None and server not in logs:
        raise ConfigError(f"stack {daemon} has no log of {server!r}; available: {', '.join(logs) or 'none'}")
    try:
        with contextlib.closing(_Logs(daemon.command.directory, server)) as printer:
            printer.look()
            printer.print(last=lines, rest=not follow)
            if follow:
                _follow(daemon, printer)
    except BrokenPipeError:  # `| head` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def _follow(daemon: DaemonProcess, printer: _Logs) -> None:
    """Print what comes, until the daemon has ended."""
    with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as exits:
        descriptor = os.pidfd_open(daemon.pid)
        exits.callback(os.close, descriptor)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            printer.look()
            printer.print()
    printer.print(rest=True)


class _Logs:
    """The logs of a stack, or of one server, as far as they have been printed."""

    def __init__(self, directory: Path, server: str | None) -> None:
        self._directory = directory
        self._server = server
        self._readers: dict[Path, tuple[str, LogReader]] = {}
        """With the name of each log as it was when the log was opened."""

    def look(self) -> None:
        """Open logs that are new. One whose file was replaced ends, and the new file is read from its beginning."""
        from gymgate.stack.logs import LogReader, named_logs

        for name, path in named_logs(self._directory).items():
            if self._server not in (None, name):
                continue
            if path in self._readers and not self._readers[path][1].is_of(path):
                old_name, reader = self._readers.pop(path)
                self._print(old_name, reader.rest())
                reader.close()
            if path not in self._readers:
                with contextlib.suppress(FileNotFoundError):
                    self._readers[path] = name, LogReader(path)

    def print(self, *, last: int | None = None, rest: bool = False) -> None:
        """Print the lines that have been written since the last call, of each log the `last` ones.

        With `rest` a last line that has no end, too.
        """
        for name, reader in self._readers.values():
            lines = reader.rest() if rest else reader.lines()
            self._print(name, lines if last is None else lines[max(0, len(lines) - last) :])

    def close(self) -> None:
        for _, reader in self._readers.values():
            reader.close()

    def _print(self, name: str, lines: Sequence[bytes]) -> None:
        if lines:
            prefix = b"" if self._server is not None else os.fsencode(f"{name} | ")
            output = sys.stdout.buffer
            if sys.stdout.isatty():
                lines = [printable(line.decode(errors="replace")).encode() for line in lines]
            left = memoryview(b"".join(prefix + line + b"\n" for line in lines))
            while left:  # with PYTHONUNBUFFERED a write may take a part only
                left = left[output.write(left) :]
            output.flush()


def _parse(names: tuple[str, ...]) -> tuple[int | None, str | None]:
    """Return the stack and the server of a command line. A number is a stack."""
    stack = int(names[0]) if names and re.fullmatch(r"\d{1,10}", names[0]) else None
    servers = names if stack is None else names[1:]
    if len(servers) > 1:
        wrong = (
            f"STACK {names[0]!r} is not a pid" if stack is None else f"{servers[1]!r} is one SERVER too many"
        )
        raise OptionError(f"{wrong}: gymgate logs [STACK] [SERVER], with a pid that `gymgate ps` shows")
    return stack, servers[0] if servers else None


def _choose(pid: int | None) -> DaemonProcess:
    """Return the stack with that pid, or the only one of this cache. Raises `ConfigError` if there is none, or several."""
    from gymgate.stack.client.daemons import find_daemons

    daemons = find_daemons()
    if pid is not None:
        return daemons.choose(pid)
    if (daemon := daemons.only()) is None:
        raise ConfigError(NONE + daemons.describe_unreachable("; "))
    return daemon
