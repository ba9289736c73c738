"""Connecting to a stack's daemon, and starting one where none answers. Blocking, for milliseconds."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gymgate
from gymgate.config import StackConfig
from gymgate.errors import StackStartError
from gymgate.files import tail
from gymgate.runtime import daemon_env
from gymgate.stack.places import locked, log_directory

BACKLOG = 512


@dataclass(frozen=True)
class Place:
    """Where a config's stack is found."""

    socket_path: Path
    directory: Path
    """For its logs."""
    env_vars: tuple[str, ...] = ()
    """Variables that its servers may see."""

    @property
    def log(self) -> Path:
        return self.directory / "daemon.log"

    def describe_loss(self) -> str:
        """Why a connection may have ended, for an error message."""
        lines = [line for line in tail(self.log, 5).splitlines() if line.strip()]
        last = f"; its log ends: {lines[-1]}" if lines else ""
        return f"the stack's daemon is gone{last}"


def place_of(config: StackConfig, identity: str, directory: Path) -> Place:
    """The place of a config's stack, by its identity, in a directory of sockets."""
    path = directory / f"{identity}.sock"
    return Place(path, log_directory(config, path), config.env_vars)


def connect_or_start(place: Place) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """A connection to the daemon, and the process if it had to be started."""
    with locked(place.socket_path):
        if (connection := _connect(place.socket_path)) is not None:
            return connection, None
        process = _start(place)
        try:
            if (connection := _connect(place.socket_path)) is None:
                raise StackStartError(place.describe_loss(), log_tail=tail(place.log))
        except BaseException:
            process.kill()
            process.wait()
            raise
        return connection, process


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def _start(place: Place) -> subprocess.Popen[bytes]:
    """Start a daemon on a socket that listens already, so that one can connect to it at once. Under the place's lock.

    It keeps our working directory, against which a config's paths are meant.
    """
    with contextlib.suppress(FileNotFoundError):
        place.socket_path.unlink()
    place.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, place.log.open("ab") as log:
        listener.bind(str(place.socket_path))
        listener.listen(BACKLOG)
        places = [str(place.socket_path), str(place.directory)]
        arguments = [str(listener.fileno()), *places, str(os.getpid())]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "gymgate.stack.daemon", *arguments],
            env=_environment(place),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def _environment(place: Place) -> dict[str, str]:
    """One in which the daemon finds the same gymgate; one allocation arena: memory counts there."""
    package_root = str(Path(gymgate.__file__).parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"MALLOC_ARENA_MAX": "1", **daemon_env(place.env_vars), "PYTHONPATH": os.pathsep.join(paths)}
