"""How many rollouts this machine's limit on open files carries at once."""

from __future__ import annotations

import resource

FILES_PER_ROLLOUT = 4
"""At the busiest process, an agent server: a row coming in, a model call, a tool call, and one to spare."""
FILES_APART = 256


def fitting_concurrency(wanted: int) -> tuple[int, str | None]:
    """At most `wanted`, and a line that says why if it is less. Raises the soft limit on open files first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return wanted, None
    fitting = max(1, (hard - FILES_APART) // FILES_PER_ROLLOUT)
    if wanted <= fitting:
        return wanted, None
    return (
        fitting,
        f"concurrency lowered from {wanted} to {fitting}: this machine allows {hard} open files (ulimit -n)",
    )
