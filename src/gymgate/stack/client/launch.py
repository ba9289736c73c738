"""Connect to a stack's daemon, and start one where none answers. Blocks for milliseconds."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import gymgate
from gymgate.core.config import StackConfig, cache_dir
from gymgate.core.errors import ConfigError, SetupError, StackLostError
from gymgate.core.files import tail
from gymgate.core.interpreter import module_command, runs_module
from gymgate.gym.runtime import daemon_env
from gymgate.stack.paths import socket_lock
from gymgate.stack.protocol import BACKLOG

_CREDENTIALS = struct.Struct("3i")
"""The process, user and group at the other end of a socket, as the kernel gives them."""
_PROGRAM = "gymgate.stack.daemon"


class DaemonCommand(NamedTuple):
    """What a daemon is started with, which its command line shows for as long as it lives."""

    listener: int
    """Descriptor of the listening socket."""
    socket_path: Path
    directory: Path
    cache: Path
    """The cache of the process that starts it, by which `gymgate stop` tells one project's stacks from another's."""
    starter: int
    """The process that starts it."""

    @property
    def words(self) -> list[str]:
        """The command line."""
        return module_command(_PROGRAM, *self)

    @classmethod
    def read(cls, words: Sequence[str]) -> Self | None:
        """Return what a command line says; `None` if it is not a daemon's."""
        arguments = words[4:]
        if not runs_module(words, _PROGRAM) or len(arguments) != len(cls._fields):
            return None
        listener, path, directory, cache, starter = arguments
        if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in (listener, starter)):
            return None
        return cls(int(listener), Path(path), Path(directory), Path(cache), int(starter))


@dataclass(frozen=True)
class DaemonAddress:
    """Where the daemon of a config is reached, and what it is started with."""

    socket_path: Path
    directory: Path
    """For logs."""
    env_vars: tuple[str, ...] = ()
    """Variables that its servers may see."""

    @classmethod
    def of(cls, config: StackConfig, identity: str, sockets: Path) -> DaemonAddress:
        """Return the address of a config's stack, whose socket is in the directory `sockets`."""
        path = sockets / f"{identity}.sock"
        directory = path.with_suffix("")
        if config.state_dir is not None:
            state = Path(config.state_dir).expanduser().absolute()
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = state / identity
        return cls(path, directory, config.env_vars)

    @property
    def log(self) -> Path:
        return self.directory / "daemon.log"

    def describe_loss(self) -> str:
        """Return why a connection may have ended, for an error message."""
        lines = [line for line in tail(self.log, 5).splitlines() if line.strip()]
        last = f"; its log ends: {lines[-1]}" if lines else ""
        return f"the stack's daemon is gone{last}"


def connect_or_start(address: DaemonAddress) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Return a connection to the daemon, and the daemon's process if it had to be started."""
    with socket_lock(address.socket_path):
        if (connection := _connect(address.socket_path)) is not None:
            return connection, None
        return _start(address)


def connect_to(path: Path) -> socket.socket:
    """Return a connection to the daemon whose socket is at this path, which may lead to another machine. Starts none.

    Raises `ConfigError` for a path that is no socket, `SetupError` for another user's, and `StackLostError` if nobody answers.
    """
    path = path.expanduser()
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(
                f"server {str(path)!r} is not a socket; `gymgate ps` shows the sockets of a machine's stacks"
            )
        connection = _connect(path)
    except FileNotFoundError:
        raise StackLostError(f"there is no stack at {path}: no such file") from None
    except OSError as error:  # no permission, or longer than a socket's path may be
        raise ConfigError(f"cannot connect to the stack at {path}: {error.strerror or error}") from None
    if connection is None:
        raise StackLostError(f"there is no stack at {path}: nobody listens there")
    return connection


def _connect(path: Path) -> socket.socket | None:
    """Connect to a daemon; `None` if there is none. Raises `SetupError` for another user's: it would be sent this user's keys."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
        _, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.getuid():
            raise SetupError(
                f"{path} belongs to a process of user {uid}; set XDG_RUNTIME_DIR to your own directory"
            )
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return None
        raise


def _start(address: DaemonAddress) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a daemon on a listening socket and connect to it. Needs the lock.

    The connection is made before this process closes its own copy of the listener. A daemon that dies at once therefore
    ends the connection like one that dies later, and the caller starts another. The daemon keeps the working directory
    of this process, to which paths in a config are relative.
    """
    with contextlib.suppress(FileNotFoundError):
        address.socket_path.unlink()  # a dead daemon's: nobody answered, and the lock keeps others out
    address.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, address.log.open("ab") as log:
        listener.bind(str(address.socket_path))
        listener.listen(BACKLOG)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(address.socket_path))
            command = DaemonCommand(
                listener.fileno(), address.socket_path, address.directory, cache_dir().absolute(), os.getpid()
            )
            process = subprocess.Popen(
                command.words,
                env=_environment(address),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        except BaseException:
            connection.close()
            raise
    return connection, process


def _environment(address: DaemonAddress) -> dict[str, str]:
    """Let the daemon find the same gymgate, and use one allocation arena, which saves memory."""
    package_root = str(Path(gymgate.__file__).parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"MALLOC_ARENA_MAX": "1", **daemon_env(address.env_vars), "PYTHONPATH": os.pathsep.join(paths)}
