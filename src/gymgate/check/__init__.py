"""Does an environment run here? Its recorded rollouts, replayed through its real agent, gateway and scoring.

    checks = await check_all([Job("mcqa"), Job("calendar")], at_once=2)

Each environment gets a process and a stack of its own, a start deadline and a memory limit, so that one that hangs
or loads 27 GB ends as a verdict.
"""

from gymgate.check.model import Check, Job, RowCheck, Verdict
from gymgate.check.pool import check_all
from gymgate.check.report import load_report, save_report, status_page

__all__ = ["Check", "Job", "RowCheck", "Verdict", "check_all", "load_report", "save_report", "status_page"]
