"""Progress of a run on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gymgate.core.errors import printable
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.counted.costs import dollars
from gymgate.runs.counted.counts import NOT_SCORED

FIRST_LINE_S = 5.0
NEXT_LINES_S = 30.0
MOST_REPLICAS = 4
"""Replicas that a line names."""
Show = Callable[[RunProgress], None]
Log = Callable[[str], None]


def log(message: str) -> None:
    """Print a message to stderr."""
    print(printable(message), file=sys.stderr, flush=True)


@contextmanager
def showing_progress() -> Iterator[tuple[Show, Log]]:
    """A function to call after each change, and one that prints a message beside the bar."""
    if not sys.stderr.isatty():
        yield Lines(), log
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=None)

        def show(progress: RunProgress) -> None:
            bar.update(task, total=progress.total, completed=progress.done, description=state(progress))

        yield (
            show,
            lambda message: console.print(printable(message), markup=False, highlight=False, soft_wrap=True),
        )


class Lines:
    """Prints a line after five seconds and then every thirty."""

    def __init__(self) -> None:
        self._next: float | None = None

    def __call__(self, progress: RunProgress) -> None:
        if self._next is None:  # the servers are up
            self._next = time.monotonic() + FIRST_LINE_S
        if (now := time.monotonic()) >= self._next:
            self._next = now + NEXT_LINES_S
            log(", ".join(filter(None, (f"{progress.done} of {progress.total} rollouts", state(progress)))))


def state(progress: RunProgress) -> str:
    """Mean reward, failures, rate, time left, tokens and cost, as far as they are known: of the whole run, as its table."""
    parts = []
    counts = progress.tasks.counts
    if (mean := progress.tasks.mean_reward) is not None:
        parts.append(f"mean reward {mean:.3f}")
    parts += [f"{count} {name}" for name in reversed(NOT_SCORED) if (count := counts.outcomes[name])]
    if (rate := progress.rate) is not None:
        parts.append(f"{rate:.1f}/s")
    if (eta := progress.eta_s) is not None and progress.left:
        parts.append(f"{duration(eta)} left")
    if (tokens := progress.token_rate) is not None:
        parts.append(f"{tokens:,.0f} tokens/s{_by_replica(progress)}")
    if (usage := progress.priced_usage) is not None:
        unknown = usage.rollouts - usage.counted
        parts.append(
            f"{dollars(usage.cost)}{f' without {unknown} rollouts of unknown cost' if unknown else ''}"
        )
    return ", ".join(parts)


def _by_replica(progress: RunProgress) -> str:
    """` (a:8000 310, b:8000 295, c:8000 left out)`; of many replicas, the range of rates and those left out."""
    replicas = {url.partition("//")[2].removesuffix("/v1"): rate for url, rate in progress.replicas.items()}
    rates = {
        name: rate
        for name, replica in replicas.items()
        if replica.healthy and (rate := replica.token_rate) is not None
    }
    out = [f"{name} left out" for name, replica in replicas.items() if not replica.healthy]
    if len(rates) > MOST_REPLICAS:
        parts = [f"{min(rates.values()):,.0f}-{max(rates.values()):,.0f} on each of {len(rates)} replicas"]
    else:
        parts = [f"{name} {rate:,.0f}" for name, rate in rates.items()]
    if len(out) > MOST_REPLICAS:
        out = [f"{len(out)} left out"]
    return f" ({', '.join([*parts, *out])})" if rates or out else ""


def duration(seconds: float) -> str:
    """`7 s`, `3:05` or `2:03:05`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, seconds_left = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"
