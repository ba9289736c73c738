"""What a process that serves many rollouts sets for itself: its limit on open files, its garbage collector."""

from __future__ import annotations

import gc
import logging
import resource
import sys

LOW = 4096
RESERVED_FILES = 64
FILES_PER_ROLLOUT = 5
"""The most sockets that a rollout holds in one process: in its agent's server, the row's, both ends of its call of itself, and
one each to the gateway and to the resources server. The daemon has three: the row's, a call's, and the endpoint's; a judge's
call takes two more. Measured by `python -m benchmarks realistic`."""
FEW_FILES_PER_ROLLOUT = 3
"""The same without judges where the agent is NeMo Gym's simple one and calls itself in memory."""

logger = logging.getLogger(__name__)
_warned = False


def raise_file_limit() -> int:
    """Raise this process's soft limit on open files to its hard limit and return it; warn, once, if that is low."""
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
        logger.warning("open files are limited to %d: about %d rollouts at once", soft, _fitting(soft))
    return soft


def max_rollouts(files_per_rollout: int = FILES_PER_ROLLOUT) -> int:
    """Return how many rollouts the limit on open files allows at once, in a daemon and an agent's server alike."""
    soft = raise_file_limit()
    return sys.maxsize if soft == resource.RLIM_INFINITY else _fitting(soft, files_per_rollout)


def _fitting(files: int, files_per_rollout: int = FILES_PER_ROLLOUT) -> int:
    return max(4, (files - RESERVED_FILES) // files_per_rollout)


def relax_collector() -> None:
    """Make the garbage collector of a serving process run less often and skip everything imported so far.

    Calls are kept for the record, so the default collector goes through ever more objects (a quarter of the gateway's
    time, measured with 16,000 calls kept), and hardly any of them are in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
