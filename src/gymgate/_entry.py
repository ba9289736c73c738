"""Entry of the `gymgate` command: an interrupt while modules are being imported ends it without a traceback."""

import signal
from typing import Any

_previous = signal.signal(signal.SIGINT, signal.SIG_DFL)

from gymgate.cli import main as _main  # noqa: E402

signal.signal(signal.SIGINT, _previous)


def main() -> Any:
    """Run the command; see `gymgate.cli.main`."""
    return _main()
