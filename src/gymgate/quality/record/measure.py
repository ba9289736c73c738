"""Runs every measurement on a running environment."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Awaitable, Callable, Mapping

from gymgate.gym.runtime.command import Progress
from gymgate.quality.model import CheckResult, SectionName
from gymgate.quality.record import (
    deterministic,
    failure_cases,
    model_rewards,
    overhead,
    shape,
    trials,
)
from gymgate.quality.record.context import MeasurementContext, Unmeasured
from gymgate.quality.sections import Section

logger = logging.getLogger(__name__)

Measurement = Callable[[MeasurementContext], Awaitable[Section]]
MEASUREMENTS: Mapping[SectionName, Measurement] = {
    "shape": shape.measure,
    "deterministic": deterministic.measure,
    "cost": overhead.measure,
    "oracle": trials.measure_right_answers,
    "probes": trials.measure,
    "policy": model_rewards.measure,
    "failures": failure_cases.measure,  # last: it may leave a server dead
}
"""By the field of `CheckResult`, in the order in which they run."""


async def measure_all(check: CheckResult, context: MeasurementContext, progress: Progress) -> CheckResult:
    """Return the result with its sections. One that takes longer than its share of the environment's time is left out."""
    sections: dict[str, Section] = {}
    missing: dict[str, str] = {}
    selection = context.request.sections or MEASUREMENTS
    share = context.request.timeout_s / len(selection)
    for name, measure in MEASUREMENTS.items():
        if name not in selection or (name == "policy" and context.request.policy is None):
            continue
        progress(f"measuring: {name}")
        try:
            async with asyncio.timeout(None if name == "policy" else share):
                sections[name] = await measure(context)
        except Unmeasured as error:
            missing[name] = str(error)
        except TimeoutError:
            missing[name] = f"not done within {share:g} s"
        except Exception as error:  # of rows and records of any shape; the verdict does not depend on it
            logger.exception("measuring %s of %s failed", name, context.environment.name)
            missing[name] = f"{type(error).__name__}: {error}"[:300]
    return check.model_copy(update={**sections, "machine": machine(), "missing": missing})


def machine() -> str:
    """Cores, memory, system and load."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
