"""The author's part of a traceback: what a server's log says about an exception."""

from __future__ import annotations

import re
from pathlib import Path

import gymgate

_HEAD = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^\([\w./-]+\) ?", re.MULTILINE)
"""NeMo Gym puts the server's name before each line."""
_OTHERS = re.compile(
    rf'File "(?:<|[^"]*/(?:site-packages|lib/python3[.\d]*)/|{re.escape(str(Path(gymgate.__file__).parent))}/)'
)
"""Frames of installed packages, of Python and of gymgate."""
_PYDANTIC = re.compile(r'File "[^"]*/site-packages/pydantic/')
_FIELD = re.compile(r"^(.*ValidationError: 1 validation error for .*)\n(\S.*)\n +(.*)", re.MULTILINE)
"""The head of pydantic's message, the field that it refuses and the reason, each on its line."""


def last_traceback(log: str) -> str:
    """Return the last traceback in a log, with the frames of the environment's own code; empty if there is none."""
    _, head, text = _PREFIX.sub("", log).rpartition(_HEAD)
    if not head:
        return ""
    frames: list[list[str]] = []
    for line in _FIELD.sub(r"\1: \2: \3", text).strip("\n").splitlines():
        if line.startswith('  File "'):
            frames.append([line])
        elif line.startswith(" "):
            if frames:
                frames[-1].append(line)
        else:
            own = [frame for frame in frames if not _OTHERS.search(frame[0])]
            own = own or [frame for frame in frames if not _PYDANTIC.search(frame[0])][-1:]
            return "\n".join([*(text_line for frame in own for text_line in frame), line])
    return ""
