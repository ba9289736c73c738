"""The directory that NeMo Gym's preparation works in: what it fetched is kept there, so that a second run needs no network."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gymgate.config import cache_dir
from gymgate.errors import SetupError

_POLL_S = 0.2


@contextlib.contextmanager
def workspace(version: str, own: Path | None, say: Callable[[str], None], timeout_s: float) -> Iterator[Path]:
    """A directory for one release, held by this process; one of its own for each user's config (`own`).

    Waits for another process that holds it. Raises `SetupError` when that takes longer than `timeout_s`, or the
    file system refuses.
    """
    name = f"nemo-gym-{version}"
    if own is not None:
        name += f"-{hashlib.sha256(str(own).encode()).hexdigest()[:12]}"
    place = cache_dir() / "data" / name
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = os.open(place / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SetupError(
            f"cannot write under {place}: {error.strerror}; set GYMGATE_CACHE to a directory of yours"
        ) from error
    try:
        _wait(lock, place, say, timeout_s)
        stage = place / ".stage"
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        yield place
    finally:
        os.close(lock)


def _wait(lock: int, place: Path, say: Callable[[str], None], timeout_s: float) -> None:
    deadline, told = time.monotonic() + timeout_s, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if not told:
            told = True
            say(f"waiting for another preparation in {place}")
        if time.monotonic() > deadline:
            raise SetupError(f"another preparation has held {place} for {timeout_s:g} s; end it if it hangs")
        time.sleep(_POLL_S)
