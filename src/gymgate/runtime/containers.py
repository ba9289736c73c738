"""Docker containers that NeMo Gym's servers started for a stack: how they are labelled, found and removed."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from gymgate.errors import SetupError
from gymgate.runtime.command import CommandError, run_command
from gymgate.runtime.environment import clean_env

STACK, SERVERS, ROLLOUT, MACHINE, PROCESS, USER = (
    f"gymgate.{name}" for name in ("stack", "servers", "rollout", "machine", "process", "user")
)
"""Labels: the stack; the servers in it that started the container, and for which rollout, where that is known; the machine,
daemon process and user of the stack."""
_TIMEOUT_S = 30.0


class Selection(NamedTuple):
    """The containers with a label. With moments (Unix time): of these, those made between them for an unknown rollout."""

    label: str
    value: str
    after: float = 0.0
    before: float = math.inf


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


def remove_selected(stack: str, selections: Collection[Selection]) -> set[Selection]:
    """Remove a stack's containers in any of the selections, and return the selections that had some.

    All had some where docker fails: what there is cannot be known. Blocks.
    """
    try:
        lines = _docker(
            "ps", "-a", "--filter", f"label={STACK}={stack}", "--format", "{{json .}}"
        ).splitlines()
        labels = {each["ID"]: _labels(each["Labels"]) for each in map(json.loads, lines)}
        found = {
            each: [name for name in labels if labels[name].get(each.label) == each.value]
            for each in selections
        }
        for each in [each for each in found if each.before != math.inf]:
            unclaimed = [name for name in found[each] if ROLLOUT not in labels[name]]
            found[each] = [name for name in unclaimed if each.after <= _made(name) <= each.before]
        if ids := {name for names in found.values() for name in names}:
            _docker("rm", "-f", *ids)
    except CommandError:
        return {*selections}
    return {each for each, names in found.items() if names}


def _made(container: str) -> float:
    """Return when a container was made (Unix time). Docker's text has nanoseconds, or no fraction."""
    text = _docker("inspect", "--format", "{{.Created}}", container).strip()
    seconds, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{seconds}.{fraction[:6] or '0':0<6}+00:00").timestamp()


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
