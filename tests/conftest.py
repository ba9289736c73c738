"""For every test."""

from __future__ import annotations

import signal

# A shell that starts the suite in the background ignores SIGINT for it, and what is ignored stays ignored in every program
# that the tests start; theirs is to be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
