"""Settings of a process that serves many rollouts: open files, garbage collector."""

from __future__ import annotations

import gc
import logging
import resource

LOW = 4096

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


def relax_collector() -> None:
    """Make the garbage collector of a serving process run less often and skip everything imported so far.

    Calls are kept for the record, so the default collector goes through ever more objects (a quarter of the gateway's
    time, measured with 16,000 calls kept), and hardly any of them are in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
