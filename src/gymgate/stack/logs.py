"""Keeps the logs of a running stack short, so that a long training does not fill their disk, or memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

MAX_LOG = 8 << 20
"""Bytes of one file. A longer one loses its beginning."""
KEPT = 2 << 20
"""Bytes at its end that stay."""
CHECK_S = 10.0

logger = logging.getLogger(__name__)


async def keep_short(directory: Path) -> None:
    """Cut the logs of a stack in `directory` whenever they grow beyond `MAX_LOG`, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            await asyncio.to_thread(cut_logs, directory)
        except OSError as error:
            logger.warning("cannot cut the logs in %s: %s", directory, error)


def cut_logs(directory: Path) -> None:
    """Leave the end of each log that is too long. Its writers append, and so continue behind that."""
    for path in (*directory.glob("*.log"), *directory.glob("logs/*/*.log")):
        with contextlib.suppress(FileNotFoundError):
            if (size := path.stat().st_size) > MAX_LOG:
                _cut(path, size)


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(-KEPT, os.SEEK_END)
        file.readline()
        end = file.read()
        file.truncate(0)
    with path.open("ab") as file:
        file.write(b"[%d bytes were dropped here]\n" % (size - len(end)) + end)
