"""The fork server: NeMo Gym imported once, a forked child per server.

`__main__.py` runs in NeMo Gym's own interpreter, where this package goes by another name and gymgate is not installed:
nothing here imports anything of ours but its siblings. The daemon uses what is exported here.
"""

from ..processes import (
    PR_SET_CHILD_SUBREAPER,
    SERVER_TAG,
    arguments_of,
    descendants,
    helpers_of,
    prctl,
    proportional_bytes,
    send_signal,
    stat,
)
from .labelling import rollout_label

__all__ = [
    "PR_SET_CHILD_SUBREAPER",
    "SERVER_TAG",
    "arguments_of",
    "descendants",
    "helpers_of",
    "prctl",
    "proportional_bytes",
    "rollout_label",
    "send_signal",
    "stat",
]
