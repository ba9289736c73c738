"""Does an environment run here? Its recorded rollouts are replayed through its real agent, gateway and scoring.

    results = await check_all([CheckRequest(environments="mcqa")], at_once=2)

Each environment gets a process and a stack of its own, a start timeout and a memory limit, so that one that hangs or
loads 27 GB still gets a verdict.
"""

from gymgate.quality.model import CheckRequest, CheckResult, RowResult, Verdict
from gymgate.quality.parallel import check_all

__all__ = [
    "CheckRequest",
    "CheckResult",
    "RowResult",
    "Verdict",
    "check_all",
]
