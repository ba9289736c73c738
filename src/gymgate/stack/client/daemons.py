"""The daemons that run on this machine: found, and asked what they do. Nobody takes a lease for that.

A daemon is found by its command line, in the kernel's list of processes. That shows also one that hangs, or whose socket is
gone, and whatever variables decided where it put its files. It counts as a daemon only if it is this user's, in this PID
namespace, and writes to the log of the directory that it names. What answers at its socket counts only if the kernel says
that it is this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from gymgate.core.addresses import without_login
from gymgate.core.config import cache_dir
from gymgate.core.errors import ConfigError, GymgateError
from gymgate.gym.inside.forkserver import arguments_of, descendants, proportional_bytes, stat
from gymgate.gym.runtime.owners import UNREACHABLE_PROCESS
from gymgate.stack.client.launch import DaemonCommand
from gymgate.stack.paths import is_shared, shared_directory, unjudged_stacks
from gymgate.stack.protocol import OBSERVE, Peer, process_at

ANSWER_S = 2.0
"""For a daemon to answer, before it counts as one that does not."""
_LISTENS = 0x10000
"""The flag of a listening socket in `/proc/net/unix`."""
_STARTED = 19
"""The field of `stat` with the start of a process, in clock ticks since boot."""

DaemonState = Literal["starting", "ready", "stopping", "not answering"]


@dataclass(frozen=True)
class DaemonProcess:
    """A daemon of this user. Two are equal if they are the same process, whose number may be another's later."""

    pid: int
    ticks: int
    """When it started, in clock ticks since boot."""
    command: DaemonCommand

    @property
    def started(self) -> float:
        """When it started (Unix time)."""
        since_boot = self.ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)

    @property
    def owner(self) -> int | None:
        """The process that the stack belongs to; `None` if every process of the user may use it."""
        return None if is_shared(self.command.socket_path) else self.command.starter

    @property
    def owner_command(self) -> list[str] | None:
        """The command line, without logins, of the process that it belongs to; `None` if that has ended or it belongs to none."""
        with contextlib.suppress(OSError):
            # A process that is younger than the daemon only has its owner's number.
            if self.owner is not None and int(stat(self.owner)[_STARTED]) <= self.ticks:
                words = [word.encode(errors="surrogateescape") for word in arguments_of(self.owner)]
                return [without_login(word.decode(errors="replace")) for word in words] or None
        return None

    @property
    def environments(self) -> list[str]:
        """Its environments, as far as their logs show them. A daemon that hangs tells no more."""
        return sorted(path.name for path in self.command.directory.glob("logs/*/"))

    @property
    def memory(self) -> int | None:
        """Bytes that it and everything below it use together; `None` where the kernel does not say."""
        return proportional_bytes((self.pid, *descendants(self.pid))) or None

    def __str__(self) -> str:
        names = ", ".join(self.environments)
        return f"{self.pid} ({names})" if names else str(self.pid)


@dataclass(frozen=True)
class DaemonOverview:
    """What was found on this machine."""

    reachable: Sequence[DaemonProcess]
    """The oldest first."""
    unreachable: Sequence[Path]
    """Directories or sockets of this user's stacks in another PID namespace, on another machine or of an earlier boot."""
    of_other_users: int
    """How many daemons of other users were seen."""

    def only(self) -> DaemonProcess | None:
        """Return this cache's stack; `None` if no stack runs. Raises `ConfigError` for several, and if all are other caches'."""
        cache = cache_dir().absolute()
        own = [daemon for daemon in self.reachable if daemon.command.cache == cache]
        if len(own) > 1:
            raise ConfigError(f"several stacks run, choose one: {', '.join(map(str, own))}")
        if self.reachable and not own:
            others = ", ".join(f"{daemon} of {daemon.command.cache}" for daemon in self.reachable)
            raise ConfigError(
                f"no stack of the cache {cache} runs; choose one of another by its pid: {others}"
            )
        return own[0] if own else None

    def choose(self, pid: int) -> DaemonProcess:
        """Return the daemon with that number. Raises `ConfigError` if there is none."""
        for daemon in self.reachable:
            if daemon.pid == pid:
                return daemon
        available = ", ".join(map(str, self.reachable)) or "none"
        raise ConfigError(
            f"no stack of this user has the pid {pid}; available: {available}{self.describe_unreachable('; ')}"
        )

    def describe_unreachable(self, before: str = "") -> str:
        """Return where there are stacks that cannot be seen from here, after `before`; empty if there are none."""
        paths = ", ".join(map(str, self.unreachable))
        return f"{before}not seen from here: {paths} ({UNREACHABLE_PROCESS})" if paths else ""


@dataclass(frozen=True)
class DaemonReport:
    """What a daemon says of itself, as far as it answers."""

    state: DaemonState
    leases: int | None = None
    processes: Sequence[int] = ()
    """The processes that have leases."""
    rollouts: int | None = None
    """Rollouts under way."""
    environments: dict[str, str] = field(default_factory=dict)
    """Each environment's state."""
    ends_in_s: float | None = None
    """Seconds until it ends, if it lingers for somebody else to come."""


def find_daemons() -> DaemonOverview:
    """Return the daemons of this machine. Blocks for milliseconds."""
    reachable: list[DaemonProcess] = []
    unreachable, of_other_users = unjudged_stacks(), 0
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]:
        with contextlib.suppress(OSError):  # it may end meanwhile
            command = DaemonCommand.read(arguments_of(pid))
            if command is None:
                continue
            if Path(f"/proc/{pid}").stat().st_uid != os.getuid():
                of_other_users += 1
            elif _namespace(pid) != _namespace(os.getpid()):
                unreachable.add(command.socket_path.parent)
            elif (daemon := _daemon_of(pid, command)) is not None:
                reachable.append(daemon)
    unreachable.update(_unreachable_sockets({daemon.command.socket_path for daemon in reachable}))
    reachable.sort(key=lambda daemon: (daemon.ticks, daemon.pid))
    return DaemonOverview(reachable, sorted(unreachable), of_other_users)


def read_daemon(pid: int) -> DaemonProcess | None:
    """Return the daemon that a process is; `None` if it is something else, another user's, or has ended."""
    try:
        command = DaemonCommand.read(arguments_of(pid))
        if command is None or Path(f"/proc/{pid}").stat().st_uid != os.getuid():
            return None
        return _daemon_of(pid, command) if _namespace(pid) == _namespace(os.getpid()) else None
    except OSError:
        return None


def _daemon_of(pid: int, command: DaemonCommand) -> DaemonProcess | None:
    """Return a process with a daemon's command line as a daemon, if it writes to the log of its directory."""
    log = Path(str(Path(f"/proc/{pid}/fd/1").readlink()).removesuffix(" (deleted)"))
    is_daemon = log.parts[-2:] == (command.directory.name, "daemon.log")
    return DaemonProcess(pid, int(stat(pid)[_STARTED]), command) if is_daemon else None


async def ask_daemons(daemons: Iterable[DaemonProcess]) -> dict[DaemonProcess, DaemonReport]:
    """Ask daemons what they do, all at once. One that has ended meanwhile is left out."""
    asked = [*daemons]
    reports = await asyncio.gather(*map(_ask, asked))
    return {
        daemon: report
        for daemon, report in zip(asked, reports, strict=True)
        if read_daemon(daemon.pid) == daemon
    }


async def _ask(daemon: DaemonProcess) -> DaemonReport:
    """Return what a daemon answers within `ANSWER_S`, else what the kernel shows of it."""
    if not _listens(daemon):
        return DaemonReport("stopping")
    try:
        connection = connect_to_observe(daemon.command.socket_path)
    except OSError:
        return DaemonReport("not answering")
    listener, peer = process_at(connection), Peer()
    if listener != daemon.pid:
        connection.close()  # until a daemon serves, its starter counts as the listener
        return DaemonReport("starting" if listener == daemon.command.starter else "not answering")
    await asyncio.get_running_loop().create_unix_connection(lambda: peer, sock=connection)
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await peer.call("report")
        names = {item.name for item in fields(DaemonReport)}  # that of another version may have more
        return DaemonReport(**{name: value for name, value in answer.items() if name in names})
    except (TimeoutError, GymgateError):
        return DaemonReport("not answering")
    finally:
        peer.abort()
        await peer.lost.wait()


def connect_to_observe(path: Path) -> socket.socket:
    """Return a connection to a daemon that holds no lease. Raises `OSError`; `BlockingIOError` where too many wait."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(str(path))
        connection.sendall(OBSERVE)
        return connection
    except BaseException:
        connection.close()
        raise


def _unreachable_sockets(reachable: Collection[Path]) -> Iterator[Path]:
    """Yield the sockets of shared stacks behind which a process listens that cannot be seen from here."""
    for path in shared_directory().glob("*.sock"):
        if path not in reachable:
            with contextlib.suppress(OSError), connect_to_observe(path) as connection:
                if process_at(connection) == 0:
                    yield path


def _namespace(pid: int) -> str:
    """Return the PID namespace of a process; empty if that is not shown."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _listens(daemon: DaemonProcess) -> bool:
    """Whether a daemon still has its listening socket, by the kernel's tables, also if the file of it is gone."""
    with contextlib.suppress(OSError):
        link = Path(f"/proc/{daemon.pid}/fd/{daemon.command.listener}").readlink()
        if (inode := re.fullmatch(r"socket:\[(\d+)\]", str(link))) is not None:
            # A line ends in the socket's path, in which any user may write anything, line ends too.
            sockets = Path(f"/proc/{daemon.pid}/net/unix").read_text(errors="replace")
            flags = re.findall(rf"^\w+: \w+ \w+ ([\dA-F]{{8}}) \w+ \w+ +{inode[1]}\b", sockets, re.MULTILINE)
            return any(int(flag, 16) & _LISTENS for flag in flags)
    return False
