"""A run's directory: one process writes it, and each line is there whole or not at all.

run.json          settings, which a resume must share, and extent, which may grow
rows.txt          the key of each row of the extent, a line each
rollouts.jsonl    a line per finished rollout
failures.jsonl    a line per failed attempt
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.errors import ConfigError, DataError
from gymgate.core.files import replacing
from gymgate.runs.plan import Identity, IdentitySet, PlannedIdentities
from gymgate.runs.record import line_error, line_identity, read_lines
from gymgate.runs.settings import differences

RUN, ROWS, ROLLOUTS, FAILURES, LOCK = "run.json", "rows.txt", "rollouts.jsonl", "failures.jsonl", ".lock"
FORMAT = 1
_BLOCK = 1 << 16
_SHARD = re.compile(r"shard-([0-9]+)-of-([0-9]+)")


class LineLog:
    """A file that only grows by whole lines. Each line is one write.

    Opening the file cuts off a torn last line, or ends it if `repair` is false. An appended line outlives this process at
    once, and a crash of the machine after the next `sync`.
    """

    def __init__(self, path: Path, *, repair: bool = True) -> None:
        self.path = path
        self.repaired = 0
        """Bytes of a torn last line that opening cut off."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._fd).st_size
            whole = _end_of_last_line(self._fd, self._size)
            if whole < self._size and not repair:
                self._size += os.write(self._fd, b"\n")
            elif whole < self._size:
                os.ftruncate(self._fd, whole)
                self.repaired, self._size = self._size - whole, whole
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._synced = self._size

    def append(self, line: bytes) -> None:
        """Add a line, its ending included. Raises `DataError` (disk full, ...) and leaves the file as it was."""
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        if written == len(line):
            self._size += written
            return
        with contextlib.suppress(OSError):  # what is appended next, once there is room, must begin a line
            os.ftruncate(self._fd, self._size)
        raise DataError(
            f"cannot write to {self.path}: only {written} of {len(line)} bytes fit; make room and run it again",
            path=str(self.path),
        )

    def sync(self) -> None:
        """Put appended lines on the disk."""
        size = self._size  # before the call: lines may be appended while the disk works
        if size == self._synced:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._synced = size

    def close(self) -> None:
        """Sync and close; idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.fdatasync(fd)
            os.close(fd)


class RunDirectory:
    """A run's directory, open for writing by this process alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts = LineLog(path / ROLLOUTS)
        self.failures = LineLog(path / FAILURES)
        self.done = IdentitySet()
        self.attempts: dict[Identity, Counter[str]] = {}
        """Failed attempts of rollouts that have not finished, by the error's class."""
        self.given_up: set[Identity] = set()
        """Rollouts that failed permanently."""
        self._read()

    @property
    def repaired(self) -> int:
        """Bytes of torn last lines that were cut off."""
        return self.rollouts.repaired + self.failures.repaired

    def add_settings(self, settings: Mapping[str, Any]) -> None:
        """Add what the stack says of itself. Raises `ConfigError` if the run has rollouts of another one."""
        _settle_settings(self.path, settings, read_run(self.path)["extent"], None)

    def count_failure(self, identity: Identity, kind: str, *, final: bool) -> None:
        """Count a failed attempt that is in `failures`."""
        self.attempts.setdefault(identity, Counter())[kind] += 1
        if final:
            self.given_up.add(identity)

    def sync(self) -> None:
        """Put everything on the disk; blocking."""
        self.rollouts.sync()
        self.failures.sync()

    def close(self) -> None:
        self.rollouts.close()
        self.failures.close()

    def _read(self) -> None:
        for number, line in read_lines(self.rollouts.path):
            try:
                self.done.add(line_identity(line))
            except ValueError as error:
                raise line_error(self.rollouts.path, number, error) from error
        # After the rollouts: failures of one that finished in the end do not count.
        for number, line in read_lines(self.failures.path):
            try:
                identity = line_identity(line)
                if identity not in self.done:
                    failure = codec.loads_object(line)
                    self.count_failure(identity, failure["error"]["kind"], final=failure["final"])
            except (ValueError, KeyError, TypeError) as error:
                raise line_error(self.failures.path, number, error) from error


@contextmanager
def open_run(
    path: Path, settings: Mapping[str, Any], extent: Mapping[str, Any], row_keys: Iterable[str] | None = None
) -> Iterator[RunDirectory]:
    """Make a run's directory, or open it to resume the run; `row_keys` are those of the extent's rows.

    Raises `ConfigError` if another process writes to it or it holds a run with other settings, which it names,
    and `DataError` if it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error
    with _locked(
        path
    ):  # before anything is read: of two that start at once, one must find the other's settings
        _settle_settings(path, settings, extent, row_keys)
        directory = RunDirectory(path)
        try:
            yield directory
        finally:
            directory.close()


def read_run(path: Path) -> dict[str, Any]:
    """The content of a directory's `run.json`. Raises `DataError` if there is none or it has another format."""
    try:
        value = codec.loads((path / RUN).read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path} holds no run: it has no {RUN}", path=str(path)) from error
    except OSError as error:
        raise DataError(f"cannot read {path / RUN}: {error.strerror}", path=str(path / RUN)) from error
    except ValueError as error:
        raise DataError(f"{path / RUN} is not JSON: {error}", path=str(path / RUN)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT or "settings" not in value:
        raise DataError(
            f"{path / RUN} was not written by gymgate, or by a release that wrote runs in another form",
            path=str(path / RUN),
        )
    return value


def read_planned(path: Path, extent: Mapping[str, Any]) -> PlannedIdentities | None:
    """The rollouts that a run consists of, by its extent; `None` if its directory does not list the rows."""
    try:
        return PlannedIdentities((path / ROWS).read_text().split(), extent)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path / ROWS}: {error.strerror}", path=str(path / ROWS)) from error


def run_directories(path: Path) -> list[Path]:
    """The directory itself if it holds a run, then its shards in order; not copies of shards under other names."""
    shards = [
        ((int(name[1]), int(name[2])), found.parent)
        for found in path.glob(f"shard-*-of-*/{RUN}")
        if (name := _SHARD.fullmatch(found.parent.name)) is not None
    ]
    own = [path] if (path / RUN).exists() else []
    return own + [shard for _, shard in sorted(shards)]


def _settle_settings(
    path: Path, settings: Mapping[str, Any], extent: Mapping[str, Any], row_keys: Iterable[str] | None
) -> None:
    settings = codec.loads(codec.dumps(settings))
    created: Any = round(time.time())
    if (path / RUN).exists():
        before = read_run(path)
        if changed := differences(before["settings"], settings):
            raise ConfigError(
                f"{path} holds a run with other settings ({'; '.join(changed)}); choose another -o"
            )
        created = before.get("created")
        settings = {**before["settings"], **settings}
    elif (path / ROLLOUTS).exists():
        raise ConfigError(
            f"{path} has a {ROLLOUTS} but no {RUN}: it is not a run of gymgate's; choose another -o"
        )
    # Rows first: `run.json` makes the directory a run, which a kill in between must not leave without them.
    if row_keys is not None:
        _write_changed(path / ROWS, b"".join(f"{key}\n".encode() for key in row_keys))
    described = {"format": FORMAT, "settings": settings, "extent": dict(extent), "created": created}
    _write_changed(path / RUN, codec.dumps(described, indent=True))


def _write_changed(path: Path, content: bytes) -> None:
    """Write a file, unless it holds that content already: a resume needs no room on the disk."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return
    with replacing(path, sync=True) as file:
        file.write(content)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"{path} is being written by {holder}; wait for it or choose another -o"
            ) from error
        except OSError as error:
            raise DataError(
                f"cannot lock {path / LOCK}: {error.strerror}; put -o on a file system that has flock",
                path=str(path),
            ) from error
        with contextlib.suppress(OSError):  # the name is for the error above; the lock holds without it
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _end_of_last_line(fd: int, size: int) -> int:
    """Offset behind the last line ending."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        block = os.pread(fd, end - start, start)
        if (found := block.rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write to {path}: {error.strerror}; what was written before is intact", path=str(path)
    )
