"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gymgate.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when the block ends; an error leaves what was there.

    Raises `DataError` for what the file system refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _refused(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        Path(name).unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refused(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot write {path}: {error.strerror or error}", path=str(path))


def _umask() -> int:
    """Of this process; `mkstemp` ignores it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
