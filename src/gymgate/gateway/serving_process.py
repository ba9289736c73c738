"""What a process that serves many rollouts sets for itself: its limit on open files, its garbage collector."""

from __future__ import annotations

import gc
import logging
import resource
import sys

LOW = 4096
RESERVED_FILES = 64
FILES_PER_ROLLOUT = 6
"""Sockets that one rollout can hold in the daemon or in its agent's server, which has the same limit."""

logger = logging.getLogger(__name__)
_warned = False


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files to its hard limit; warn, once, if that is low.

    A model call under way holds two sockets.
    """
    global _warned
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError) as error:
            logger.debug("RLIMIT_NOFILE stays at %d: %s", soft, error)
    if soft != resource.RLIM_INFINITY and soft < LOW and not _warned:
        _warned = True
        logger.warning("open files are limited to %d: about %d concurrent model calls", soft, soft // 2)


def max_rollouts() -> int:
    """Return how many rollouts the limit on open files allows at once, in a daemon, an agent's server and a run alike."""
    raise_file_limit()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(4, (soft - RESERVED_FILES) // FILES_PER_ROLLOUT)


def relax_collector() -> None:
    """Make the garbage collector of a serving process run less often and skip everything imported so far.

    Calls are kept for the record, so the default collector goes through ever more objects (a quarter of the gateway's
    time, measured with 16,000 calls kept), and hardly any of them are in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
