"""Docker containers that NeMo Gym's servers started for a stack: how they are labelled, found and removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.errors import SetupError
from gymgate.gym.runtime.command import CommandError, run_command
from gymgate.gym.runtime.owners import UNREACHABLE_PROCESS, has_ended, owner
from gymgate.gym.runtime.variables import clean_env

STACK, SERVERS, ROLLOUT, PROCESS, USER = (
    f"gymgate.{name}" for name in ("stack", "servers", "rollout", "process", "user")
)
"""Labels: the stack; the servers in it that started the container, and for which rollout, where that is known; the daemon
process and user of the stack."""
_TIMEOUT_S = 30.0
"""For one docker command: removing many containers on a busy machine takes it seconds."""


class Selection(NamedTuple):
    """The containers with a label."""

    label: str
    value: str


class Leftover(NamedTuple):
    """A container whose stack is gone or cannot be seen from here."""

    id: str
    name: str
    image: str
    is_certain: bool
    """Whether the stack is gone. If not, it may run in another PID namespace or on another machine."""


def labels_of(stack: str, servers: str) -> dict[str, str]:
    """Return the labels of containers that servers of a stack of this process start."""
    return {
        STACK: stack,
        SERVERS: servers,
        PROCESS: owner(),
        USER: str(os.getuid()),
    }


def remove_selected(stack: str, selections: Collection[Selection]) -> set[Selection]:
    """Remove a stack's containers in any of the selections, and return the selections that had some.

    All had some where docker fails: what there is cannot be known. Blocks.
    """
    try:
        labels = {
            container["ID"]: _labels(container["Labels"]) for container in _containers(f"{STACK}={stack}")
        }
        matches = {
            selection: [id for id in labels if labels[id].get(selection.label) == selection.value]
            for selection in selections
        }
        if ids := {id for ids in matches.values() for id in ids}:
            _docker("rm", "-f", *ids)
    except CommandError:
        return {*selections}
    return {selection for selection, ids in matches.items() if ids}


def leftovers() -> list[Leftover]:
    """Return the containers of this user's stacks whose daemon process has ended or cannot be seen. Blocks; needs docker.

    Empty where docker is not there or does not answer.
    """
    if shutil.which("docker") is None:
        return []
    try:
        containers = _containers(f"{USER}={os.getuid()}")
    except CommandError:
        return []
    return [
        Leftover(container["ID"], container["Names"], container["Image"], ended is True)
        for container in containers
        if (ended := has_ended(_labels(container["Labels"]).get(PROCESS, ""))) is not False
    ]


def describe_unjudged(containers: list[Leftover]) -> str:
    """Return which containers belong to stacks that cannot be seen from here, and what removes them; empty for none."""
    names = [container.name for container in containers if not container.is_certain]
    return (
        f"{len(names)} of stacks {UNREACHABLE_PROCESS}; if those are gone: docker rm -f {' '.join(names)}"
        if names
        else ""
    )


def remove_leftovers(containers: list[Leftover]) -> None:
    """Remove containers. Raises `SetupError` if docker refuses."""
    try:
        if containers:
            _docker("rm", "-f", *(container.id for container in containers))
    except CommandError as error:
        raise SetupError(f"docker cannot remove containers: {error.last_line}") from error


def _containers(label: str) -> list[dict[str, Any]]:
    """Return what docker says of the containers with a label, those that have ended included."""
    listed = _docker("ps", "-a", "--filter", f"label={label}", "--format", "{{json .}}")
    lines = listed.encode().splitlines()  # of bytes: those of a text would also end at a label's U+0085
    return [codec.loads(line) for line in lines]


def _docker(*words: str) -> str:
    return run_command(["docker", *words], env=clean_env(), timeout_s=_TIMEOUT_S)


def _labels(text: str) -> dict[str, str]:
    return dict(pair.partition("=")[::2] for pair in text.split(","))
