"""A run's directory as it is written: by one process, and each line is there whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import socket
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.errors import ConfigError, DataError
from gymgate.core.files import open_descriptor, open_regular, replacing
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.described.plan import Identity, IdentitySet
from gymgate.runs.described.settings import differences
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.layout import FAILURES, FORMAT, ROLLOUTS, ROWS, RUN, read_row_keys, read_run
from gymgate.runs.stored.record import CollectedRollout, failure_line, to_line
from gymgate.runs.stored.score import Score

LOCK = ".lock"
_BLOCK = 1 << 16


class LineLog:
    """A file that only grows by whole lines. Each line is one write.

    Opening the file cuts off a torn last line. An appended line outlives this process at once, and a crash of the machine
    after the next `sync`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repaired = 0
        """Bytes of a torn last line that opening cut off."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._size = os.fstat(self._fd).st_size
            whole = _end_of_last_line(self._fd, self._size)
            if whole < self._size:
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


class RunDirectory(Container[Identity]):
    """A run's directory, open for writing by this process alone. What it holds is read once, when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts = LineLog(path / ROLLOUTS)
        self.failures = LineLog(path / FAILURES)
        self.done = IdentitySet()
        self.attempts: dict[Identity, Counter[str]] = {}
        """Failed attempts of rollouts that have not finished, by the error's class."""
        self.given_up: set[Identity] = set()
        """Rollouts that failed permanently."""
        # Rollouts that finished come first: failed attempts at one that finished in the end do not count.
        self.tasks = read_runs(
            [path], first_of_overlap=True, see=self._see, see_attempt=self._see_failure
        ).tasks
        """What was there when it was opened."""

    @property
    def repaired(self) -> int:
        """Bytes of torn last lines that were cut off."""
        return self.rollouts.repaired + self.failures.repaired

    def add(self, rollout: CollectedRollout) -> None:
        """Append a rollout that finished."""
        self.rollouts.append(to_line(rollout))
        self.done.add(rollout.identity)
        self.attempts.pop(rollout.identity, None)

    def add_failure(self, rollout: CollectedRollout, *, final: bool) -> None:
        """Append a failed attempt; `final` if no further one follows."""
        assert rollout.error is not None
        self.failures.append(failure_line(rollout, final=final))
        self._count_failure(rollout.identity, rollout.error.kind, final=final)

    def add_settings(self, settings: Mapping[str, Any]) -> None:
        """Add what the stack says of itself. Raises `ConfigError` if the run has rollouts of another one."""
        _settle_settings(self.path, settings, read_run(self.path)["extent"], None)

    def __contains__(self, identity: object) -> bool:
        """Whether a rollout finished or failed permanently: it is not run again."""
        return identity in self.done or identity in self.given_up

    def retry_failed(self) -> None:
        """Give back the retries of the rollouts that failed."""
        self.attempts.clear()
        self.given_up.clear()

    def sync(self) -> None:
        """Put everything on the disk; blocking."""
        self.rollouts.sync()
        self.failures.sync()

    def close(self) -> None:
        self.rollouts.close()
        self.failures.close()

    def _count_failure(self, identity: Identity, kind: str, *, final: bool) -> None:
        self.attempts.setdefault(identity, Counter())[kind] += 1
        if final:
            self.given_up.add(identity)

    def _see(self, attempt: Attempt, _: Score) -> None:
        if not attempt.has_failed:
            self.done.add(attempt.identity)

    def _see_failure(self, attempt: Attempt) -> None:
        if attempt.identity not in self.done:
            kind = "unknown" if attempt.error is None else attempt.error.kind
            self._count_failure(attempt.identity, kind, final=attempt.final)


def checked_output(path: Path) -> Path:
    """Return the path of a run's directory. Raises `ConfigError` for the name of a file, or a file."""
    if path.suffix in (".jsonl", ".ndjson"):
        name = shlex.quote(str(path.with_suffix("")))
        raise ConfigError(
            f"-o {path}: a run is kept in a directory; give -o {name}, whose {ROLLOUTS} grows while it runs, and then "
            f"gymgate export {name} --to jsonl -o {shlex.quote(str(path))}"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"-o {path} is a file; give a directory")
    return path


@contextmanager
def open_run(
    path: Path, settings: Mapping[str, Any], extent: Mapping[str, Any], row_keys: Iterable[str] | None = None
) -> Iterator[RunDirectory]:
    """Make a run's directory, or open it to resume the run; `row_keys` are those of the extent's rows.

    Raises `ConfigError` if another process writes to it or it holds a run with other settings, which it names,
    and `DataError` if it cannot be written.
    """
    try:
        checked_output(path).mkdir(parents=True, exist_ok=True)
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


def _settle_settings(
    path: Path, settings: Mapping[str, Any], extent: Mapping[str, Any], row_keys: Iterable[str] | None
) -> None:
    settings = codec.loads(codec.dumps(settings))
    row_keys = None if row_keys is None else [*row_keys]
    created: Any = round(time.time())
    if (path / RUN).exists():
        before = read_run(path)
        if changed := differences(before["settings"], settings):
            raise ConfigError(
                f"{path} holds a run with other settings ({'; '.join(changed)}); choose another -o"
            )
        _refuse_other_rows(path, before["settings"].get("sources"), settings.get("sources"), row_keys)
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


def _refuse_other_rows(path: Path, before: Any, now: Any, row_keys: Sequence[str] | None) -> None:
    """Raise `ConfigError` if a file elsewhere has none of the run's rows: it only has the same name."""
    if before == now or not row_keys:
        return
    earlier_keys = {*(read_row_keys(path) or ())}
    if earlier_keys and earlier_keys.isdisjoint(row_keys):
        raise ConfigError(
            f"{path} holds a run with other rows (of {before}, not of {now}); choose another -o"
        )


def _write_changed(path: Path, content: bytes) -> None:
    """Write a file, unless it holds that content already: a resume needs no room on the disk."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        if file.read(len(content) + 1) == content:
            return
    with replacing(path, sync=True) as file:
        file.write(content)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        fd = open_descriptor(path / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _cannot_write(path / LOCK, error) from error
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
        if (ending := block.rfind(b"\n")) >= 0:
            return start + ending + 1
        end = start
    return 0


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write to {path}: {error.strerror}; what was written before is intact", path=str(path)
    )
