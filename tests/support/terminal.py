"""Commands on a real terminal of some width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios


def terminal(width: int, *words: str) -> list[str]:
    """Run a command on a terminal of that width; its lines, without escape sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "gymgate", *words]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env={**variables, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            output += part
        os.close(ours)
        assert process.stderr is not None
        assert process.wait(timeout=60) == 0, process.stderr.read().decode()
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output.decode()).replace("\r\n", "\n").splitlines()
