"""Stored runs as numbers, for scripts and notebooks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.rollouts.notebook import html_table, html_text
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.metrics import REPLAYED, in_view, summary_rows

MOST_NOTES = 20
"""Notes that a notebook shows."""
MOST_ENVIRONMENTS = 500
"""Environments that a notebook shows."""


@dataclass(frozen=True)
class RunSummary:
    """The metrics of stored runs. A notebook shows them as a table."""

    environments: Sequence[Mapping[str, Any]]
    """Metrics of each environment and, if there are several, over all tasks (`all`), as fractions."""
    replayed: bool
    """Whether recorded rollouts answered for the policy."""
    notes: Sequence[str]
    """What is missing, failed or not as planned."""

    def _repr_html_(self) -> str:
        names, shown = in_view(self.environments), self.environments[:MOST_ENVIRONMENTS]
        cells = [[_shown(row.get(name)) for name in names] for row in shown]
        accounts = [row["account"] for row in self.environments[-1:]]
        notes = [*accounts, *([REPLAYED] if self.replayed else []), *self.notes]
        left = ((len(self.environments) - len(shown), "environments"), (len(notes) - MOST_NOTES, "notes"))
        told = [*notes[:MOST_NOTES], *(f"{count} {kind} are left out" for count, kind in left if count > 0)]
        said = "".join(f"<p>{html_text(note)}</p>" for note in told)
        return f"<div>{html_table(names, cells)}{said}</div>"


def summarize(
    run: str | os.PathLike[str],
    *more: str | os.PathLike[str],
    ks: Sequence[int] | None = None,
    answer_key: str | None = None,
    failed_as: float | None = None,
) -> RunSummary:
    """Return the metrics of stored runs, as `gymgate aggregate` prints them.

    Each is a directory of `gymgate run` or `collect`, whose shards are merged, or a rollouts.jsonl of NeMo Gym's
    collector. `ks` are the k of pass@k and maj@k, by default 1, 2, 4, 8, ...; `answer_key` is the field of the result
    that holds the answer; rollouts that failed count with the reward `failed_as`, else they are left out. Raises `DataError`
    if a path holds no run or no rollout, and `ConfigError` for runs of different policies or with rollouts in common.
    """
    table = read_runs([Path(path) for path in (run, *more)], answer_key=answer_key, failed_as=failed_as)
    table.refuse_empty()
    return RunSummary(summary_rows(table.tasks, ks), table.replayed, table.notes)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
