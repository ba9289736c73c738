"""`gymgate stop`: end stacks of this machine."""

from __future__ import annotations

import sys

import click

from gymgate.cli.output import echo, log
from gymgate.cli.stack_commands import NONE, command_text, log_hidden
from gymgate.core.errors import OptionError


@click.command("stop")
@click.argument("pids", nargs=-1, type=click.IntRange(min=1), metavar="[STACK]...")
@click.option(
    "--all", "everything", is_flag=True, help="Every stack of this user on this machine, whatever its cache."
)
@click.option("--now", is_flag=True, help="Kill at once, without letting servers shut down.")
def command(pids: tuple[int, ...], everything: bool, now: bool) -> None:
    """Stop stacks of this machine.

    STACK is the pid that `gymgate ps` shows; it can be left out while one stack of this cache runs (of this
    GYMGATE_CACHE or home directory; `ps` lists all). Running rollouts fail with
    StackLostError, as if the daemon had died. Servers get a second to shut down; a stack that has not stopped after 10 s is
    killed. Stop the program that uses the stack first: this command does not, and the program may start the stack again.
    """
    from gymgate.stack.client.daemons import find_daemons
    from gymgate.stack.client.ending import end_daemons

    if pids and everything:
        raise OptionError("--all stops every stack; leave out STACK or --all")
    daemons = find_daemons()
    if everything:
        selection = [*daemons.reachable]
    elif pids:
        selection = [daemons.choose(pid) for pid in dict.fromkeys(pids)]
    else:
        selection = [daemon] if (daemon := daemons.only()) is not None else []
    if not selection:
        echo(NONE)
    described = {daemon: str(daemon) for daemon in selection}  # its logs are removed with it
    endings = end_daemons(selection, now=now)
    for daemon, ending in endings.items():
        echo(f"{ending} {described[daemon]}")
        if (program := daemon.owner_command) is not None:
            log(f"process {daemon.owner} still runs and may start it again: {command_text(program)}")
    if not pids:
        log_hidden(daemons)
    sys.exit(int("still there" in endings.values()))
