"""What commands on running stacks share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gymgate.cli.output import log

if TYPE_CHECKING:
    from gymgate.stack.client.daemons import DaemonOverview

MAX_COMMAND = 60
"""Characters of a command that are shown."""
NONE = "no stack runs on this machine"


def log_hidden(daemons: DaemonOverview) -> None:
    """Say which stacks were seen but cannot be looked at."""
    if elsewhere := daemons.describe_unreachable():
        log(elsewhere)
    if daemons.of_other_users:
        log(f"stacks of other users: {daemons.of_other_users}")


def command_text(words: Sequence[str]) -> str:
    """Return a command line as a short line."""
    text = " ".join([Path(words[0]).name, *words[1:]])
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= MAX_COMMAND else f"{line[: MAX_COMMAND - 1]}…"
