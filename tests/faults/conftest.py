"""Every fault leaves as much behind as was there before: processes, open files, sockets on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ledger import Ledger, adopt_orphans


@pytest.fixture(autouse=True, scope="session")
def runtime_directory() -> Iterator[Path]:
    """One of this suite's own for sockets, short enough for them."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(tempfile.mkdtemp(prefix="gf-", dir="/tmp"))
    os.environ["XDG_RUNTIME_DIR"] = str(path)
    yield path
    shutil.rmtree(path, ignore_errors=True)
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(autouse=True)
def nothing_left(runtime_directory: Path) -> Iterator[Ledger]:
    """No orphan process, no open descriptor, nothing of a stack on disk, five seconds after the test."""
    adopt_orphans()
    ledger = Ledger(runtime_directory)
    yield ledger
    assert not (left := ledger.settle()), left
