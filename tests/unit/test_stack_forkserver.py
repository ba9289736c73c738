"""A fork server whose daemon is gone before it has begun."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from gymgate.stack import forkserver

PROGRAM = Path(forkserver.__file__).with_name("__main__.py")


def test_it_ends_without_importing_nemo_gym() -> None:
    """Which takes seconds, and which this interpreter does not have."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        process = subprocess.run(
            [sys.executable, str(PROGRAM), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (process.returncode, process.stderr) == (0, "")
