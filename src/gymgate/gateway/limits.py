"""The limit on open files: a rollout in a model call holds two sockets."""

from __future__ import annotations

import logging
import resource

LOW = 4096

logger = logging.getLogger(__name__)
_warned = False


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files to its hard limit; warn, once, if that is low."""
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
