"""Docker containers that NeMo Gym's servers started for a stack: how they are labelled, found and removed."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from gymgate.errors import SetupError
from gymgate.runtime.command import CommandError, run_command
from gymgate.runtime.environment import clean_env

STACK, SERVERS, MACHINE, PROCESS, USER = (
    f"gymgate.{name}" for name in ("stack", "servers", "machine", "process", "user")
)
"""Labels: the stack; the servers in it that started the container; the machine, daemon process and user of the stack."""
_TIMEOUT_S = 30.0
_PAUSE_S = 0.5
_QUIET_ROUNDS = 3
"""Looks that find no container before it is believed: `docker run` may be under way when the servers end."""
_GIVE_UP_S = 120.0


class Leftover(NamedTuple):
    """A container whose stack is gone."""

    id: str
    name: str
    image: str
    state: str


def labels_of(stack: str, servers: str) -> dict[str, str]:
    """Return the labels of containers that servers of a stack of this process start."""
    return {
        STACK: stack,
        SERVERS: servers,
        MACHINE: _machine(),
        PROCESS: _process(os.getpid()) or "",
        USER: str(os.getuid()),
    }


def remove_labelled(label: str, value: str, after: float = 0.0, before: float = math.inf) -> None:
    """Remove all containers with a label that were made between two moments (Unix time), also those that appear meanwhile.

    Blocks until none has been seen for a second, for two minutes at most.
    """
    quiet, deadline = 0, time.monotonic() + _GIVE_UP_S
    while quiet < _QUIET_ROUNDS and time.monotonic() < deadline:
        try:
            ids = _docker("ps", "-aq", "--filter", f"label={label}={value}").split()
            if ids and before != math.inf:
                ids = _made_between(ids, after, before)
            if ids:
                _docker("rm", "-f", *ids)
        except CommandError:
            ids = ["unknown"]
        quiet = 0 if ids else quiet + 1
        time.sleep(_PAUSE_S)


def _made_between(ids: list[str], after: float, before: float) -> list[str]:
    lines = _docker("inspect", "--format", "{{.Id}} {{.Created}}", *ids).splitlines()
    made = (
        (name, datetime.fromisoformat(_microseconds(text)).timestamp())
        for name, text in map(str.split, lines)
    )
    return [name for name, moment in made if after <= moment <= before]


def _microseconds(text: str) -> str:
    """Return docker's time, which has nanoseconds or none, as `datetime` reads it."""
    seconds, _, fraction = text.rstrip("Z").partition(".")
    return f"{seconds}.{fraction[:6] or '0':0<6}+00:00"


def leftovers() -> list[Leftover]:
    """Return the containers of this user's stacks on this machine whose daemon process is gone. Blocks; needs docker.

    Empty where docker is not there or does not answer.
    """
    if shutil.which("docker") is None:
        return []
    mine = (f"label={USER}={os.getuid()}", f"label={MACHINE}={_machine()}")
    filters = [word for each in mine for word in ("--filter", each)]
    try:
        lines = _docker("ps", "-a", *filters, "--format", "{{json .}}").splitlines()
    except CommandError:
        return []
    return [
        Leftover(each["ID"], each["Names"], each["Image"], each["State"])
        for each in map(json.loads, lines)
        if not _runs(_labels(each["Labels"]).get(PROCESS, ""))
    ]


def remove(containers: list[Leftover]) -> None:
    """Remove containers. Raises `SetupError` if docker refuses."""
    try:
        if containers:
            _docker("rm", "-f", *(each.id for each in containers))
    except CommandError as error:
        raise SetupError(f"docker cannot remove containers: {error.last_line}") from error


def _docker(*words: str) -> str:
    return run_command(["docker", *words], env=clean_env(), timeout_s=_TIMEOUT_S)


def _labels(text: str) -> dict[str, str]:
    return dict(pair.partition("=")[::2] for pair in text.split(","))


def _machine() -> str:
    """Return what tells this machine from others that may use the same docker daemon."""
    try:
        return Path("/etc/machine-id").read_text().strip() or os.uname().nodename
    except OSError:
        return os.uname().nodename


def _process(pid: int) -> str | None:
    """Return boot, number and start time of a process, which no other has; `None` if it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}.{pid}.{fields[19]}"


def _runs(process: str) -> bool:
    pid = [*process.split("."), "", ""][1]
    return pid.isdigit() and _process(int(pid)) == process
