"""Files on disk: replace one as a whole, open only what is one, read a bounded one or the end of one, take its digest."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gymgate.core.errors import ConfigError, DataError

LONGEST = 256 << 20
"""Bytes of a file that is read as a whole."""


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` when the block ends without an error. `sync`: write it through to the disk.

    Raises `DataError` if the file system refuses.
    """
    with writing_to(path):
        # Made with its final mode: whoever owns the directory may put a link in its place before a `chmod`.
        scratch = _scratch(path)
        try:
            with scratch.open("xb") as file:
                yield file
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


@contextmanager
def filling(path: Path) -> Iterator[Path]:
    """Make a directory that gets the name `path` when the block ends without an error.

    Raises `ConfigError` if there is something at `path`, `DataError` if the file system refuses.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another directory")
    with writing_to(path):
        scratch = _scratch(path)
        scratch.mkdir()
        try:
            yield scratch
            scratch.rename(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Make the directory that a path is in; an `OSError` here or in the block becomes a `DataError` about the path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from error


def open_regular(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a file for reading, as `open_descriptor` does."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb", buffering)


def open_descriptor(path: Path, flags: int) -> int:
    """Open a file in a directory that may be somebody else's; the directory itself may be reached through links.

    Raises `OSError` for a link, which may lead to any file of this user; for a pipe or a device, which may have no end or
    never begin; and, if it is to be written, for a file with a second name, whose content would change there as well.
    """
    assert not flags & os.O_TRUNC  # it would cut the file before these checks
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link; only its directory may be one", str(path)) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
        here = shlex.quote(str(path.parent))
        reason = f"it has a second hard link, as `cp -al` makes, and both would change; use a copy: cp -r {here} NEW"
    else:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, reason, str(path))


def read_whole(file: IO[bytes]) -> bytes:
    """Return what is left of a file. Raises `OSError` for more than `LONGEST` bytes: a device may have no end."""
    content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise OSError(errno.EFBIG, f"longer than {LONGEST >> 20} MiB", file.name)
    return content


def tail(path: Path, lines: int = 20, size: int = 16384) -> str:
    """Return the last `lines` lines in the last `size` bytes of a file; an empty string if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _scratch(path: Path) -> Path:
    """A new name beside a path."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")
