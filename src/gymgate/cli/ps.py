"""`gymgate ps`: the stacks that run on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gymgate.cli.options import json_option
from gymgate.cli.output import echo, print_json, print_table, size_text
from gymgate.cli.stack_commands import NONE, command_text, log_hidden

if TYPE_CHECKING:
    from gymgate.stack.client.daemons import DaemonProcess, DaemonReport


@dataclass(frozen=True)
class ListedEnvironment:
    """An environment of a stack."""

    name: str
    state: str | None
    """`starting`, `up`, `restarting`, `down` or `stopped`; `None` if the stack does not answer."""


@dataclass(frozen=True)
class ListedStack:
    """A stack as `gymgate ps --json` prints it. What a stack that does not answer has not said is `None`."""

    pid: int
    """Its daemon."""
    state: Literal["starting", "ready", "stopping", "not answering"]
    environments: Sequence[ListedEnvironment]
    rollouts: int | None
    """Rollouts under way."""
    started: float
    """Seconds since 1970."""
    memory: int | None
    """Bytes, of all its processes together (PSS)."""
    share: Literal["process", "machine"]
    owner: int | None
    """The process that it belongs to; `None` with `share="machine"`."""
    command: Sequence[str] | None
    """That process's command line; `None` if it has ended."""
    leases: int | None
    processes: Sequence[int]
    """The processes that have leases."""
    ends_in_s: float | None
    """Seconds until it ends, if it lingers for somebody else to come."""
    socket: Path
    """What `StackConfig(server=...)` joins the stack by."""
    directory: Path
    """Its logs are here and in `logs`."""


@dataclass(frozen=True)
class StackListing:
    """What `gymgate ps --json` prints."""

    stacks: Sequence[ListedStack]
    """The oldest first."""
    elsewhere: Sequence[Path]
    """Directories or sockets of this user's stacks in another PID namespace, on another machine or of an earlier boot."""
    of_other_users: int
    """How many stacks of other users were seen."""


@click.command("ps")
@json_option
def command(as_json: bool) -> None:
    """List the stacks that run on this machine.

    For each stack of your user: the pid of its daemon, its environments, the rollouts under way, its age, the memory of all
    its processes, and who uses it: one process, or those that share it. A stack that does not answer within 2 s is listed as
    `not answering`. Below are the sockets of shared stacks, which other machines can join. Looking at a stack neither keeps
    nor stops it. Stacks on other nodes of a Ray cluster are listed there.
    """
    from gymgate.stack.client.daemons import ask_daemons, find_daemons

    daemons = find_daemons()
    reports = asyncio.run(ask_daemons(daemons.reachable))
    stacks = [_listed(daemon, report) for daemon, report in reports.items()]
    if as_json:
        print_json(StackListing(stacks, daemons.unreachable, daemons.of_other_users))
        return
    if stacks:
        header = ("pid", "state", "environments", "rollouts", "age", "memory", "used by")
        print_table(header, map(_row, stacks), fixed=2)
        for stack in stacks:
            if stack.share == "machine":  # below the table, whose cells are wrapped
                echo(f"socket of {stack.pid}: {stack.socket}")
    else:
        echo(NONE)
    log_hidden(daemons)


def _listed(daemon: DaemonProcess, report: DaemonReport) -> ListedStack:
    states: dict[str, str | None] = dict(report.environments) or dict.fromkeys(daemon.environments)
    return ListedStack(
        pid=daemon.pid,
        state=report.state,
        environments=[ListedEnvironment(name, state) for name, state in states.items()],
        rollouts=report.rollouts,
        started=daemon.started,
        memory=daemon.memory,
        share="machine" if daemon.owner is None else "process",
        owner=daemon.owner,
        command=daemon.owner_command,
        leases=report.leases,
        processes=report.processes,
        ends_in_s=report.ends_in_s,
        socket=daemon.command.socket_path,
        directory=daemon.command.directory,
    )


def _row(stack: ListedStack) -> tuple[str, ...]:
    from gymgate.runs.collected.progress_display import duration

    names = [
        environment.name
        if environment.state in ("up", stack.state, None)
        else f"{environment.name} ({environment.state})"
        for environment in stack.environments
    ]
    return (
        str(stack.pid),
        stack.state,
        ", ".join(names) or "-",
        "-" if stack.rollouts is None else str(stack.rollouts),
        duration(max(0.0, time.time() - stack.started)),
        "-" if stack.memory is None else size_text(stack.memory),
        _user(stack),
    )


def _user(stack: ListedStack) -> str:
    """Return who uses a stack, on one line."""
    if stack.owner is None:
        leases = "?" if stack.leases is None else stack.leases
        ends = "" if stack.ends_in_s is None else f", ends in {stack.ends_in_s:.0f} s"
        return f"shared, {leases} {'lease' if leases == 1 else 'leases'}{ends}"
    if stack.command is None:
        return f"{stack.owner} (ended)"
    return f"{stack.owner} {command_text(stack.command)}"
