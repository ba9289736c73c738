"""`gymgate.evaluate`: the rollouts of a policy and their metrics, in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymgate.core.errors import ConfigError
from gymgate.results.export import table_row
from gymgate.runs.collected.progress_display import Log, Show, showing_progress
from gymgate.runs.collected.run import ignore
from gymgate.runs.collected.stream import Environments, Rows, open_collection, rollouts_of
from gymgate.runs.counted.account import notes_on
from gymgate.runs.counted.metrics import summary_rows
from gymgate.runs.counted.summary import RunSummary
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.described.settings import example_note, is_example, policy_name
from gymgate.runs.stored.record import CollectedRollout
from gymgate.runs.stored.score import score_of
from gymgate.stack import Policy
from gymgate.stack.sync import run_apart


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Rollouts and their metrics. A notebook shows the metrics as a table."""

    rollouts: Sequence[CollectedRollout]
    """All, failed ones included (`reward` is `None`, `error` says why), in the order of rows, seeds and repeats."""
    metrics: Sequence[Mapping[str, Any]]
    """Metrics of each environment and, if there are several, over all tasks (`all`), as `gymgate aggregate --json` has them."""
    notes: Sequence[str]
    """What a reader of the metrics has to know, e.g. how many rollouts failed, and that rows lack the expected answer."""
    model: str
    """Name of the policy's model or function."""
    run: str | None
    """The directory of the run; `None`: nothing was written."""
    failed_as: float | None = None
    """The reward that failed rollouts count with; `None`: they are left out."""

    @property
    def mean_reward(self) -> float | None:
        """The mean over all rewards that count; `None` if there is none."""
        return self.metrics[-1]["mean_reward"] if self.metrics else None

    @property
    def failed(self) -> list[CollectedRollout]:
        """The rollouts that failed."""
        return [rollout for rollout in self.rollouts if rollout.error is not None]

    def records(self) -> list[dict[str, Any]]:
        """Return a flat dict for each rollout, e.g. for `pandas.DataFrame`: the columns of `gymgate export`."""
        parts = sorted({name for rollout in self.rollouts for name in rollout.reward_parts})
        return [table_row(rollout, self.model, self.run, parts, self.failed_as) for rollout in self.rollouts]

    def __repr__(self) -> str:
        mean = "none" if self.mean_reward is None else f"{self.mean_reward:.4g}"
        account = self.metrics[-1]["account"] if self.metrics else "no rollouts"
        return f"<Evaluation of {self.model}: mean reward {mean}; {account}>"

    def _repr_html_(self) -> str:
        return RunSummary(self.metrics, False, self.notes)._repr_html_()


def evaluate(
    environments: Environments,
    rows: Rows = "example",
    *,
    policy: Policy,
    repeats: int = 1,
    limit: int | None = None,
    ks: Sequence[int] | None = None,
    failed_as: float | None = None,
    progress: bool = True,
    **settings: Any,
) -> Evaluation:
    """Run rows x repeats with a policy, and return the rollouts and their metrics.

    `policy` is a function, plain or async, or an endpoint. `rows` is a packaged file's name (`example`: a few rows, not the
    benchmark), a path, `hf:owner/name[:split]` or dicts; `limit` is how many of each source to take. `ks` are the k of pass@k
    and maj@k, by default 1, 2, 4, 8, ... Rollouts that failed count with the reward `failed_as`, else they are left out.
    `settings` are others of `collect`: `concurrency`, `seeds`, `output`, ...

    Progress goes to stderr, unless `progress` is false. An async function runs on another event loop than the caller's, which
    may be a notebook's; `evaluate_async` runs it on the caller's. Failed rollouts are returned, too. Raises what keeps a run
    from starting, and the last error if so many fail in a row that the run stops: see `collect`. An endpoint is asked for its
    models first: a wrong address, key or model raises before anything starts.
    """
    work = evaluate_async(
        environments,
        rows,
        policy=policy,
        repeats=repeats,
        limit=limit,
        ks=ks,
        failed_as=failed_as,
        progress=progress,
        **settings,
    )
    return run_apart(work)


async def evaluate_async(
    environments: Environments,
    rows: Rows = "example",
    *,
    policy: Policy,
    repeats: int = 1,
    limit: int | None = None,
    ks: Sequence[int] | None = None,
    failed_as: float | None = None,
    progress: bool = True,
    **settings: Any,
) -> Evaluation:
    """Do what `evaluate` does, on the caller's event loop."""
    if not isinstance(ks, Sequence | None):
        raise ConfigError(f"ks={ks!r} is not a list; write ks=[{ks!r}]")
    with _showing(progress) as (show, log):
        run = await open_collection(
            environments,
            rows,
            policy=policy,
            repeats=repeats,
            limit=limit,
            progress=log,
            ask_known=True,
            **settings,
        )
        run.progress.tasks.count_failed_as(failed_as)
        rollouts = []
        async with contextlib.aclosing(rollouts_of(run)) as stream:
            async for rollout in stream:
                rollouts.append(rollout)
                show(run.progress)
        settings_of_policy = run.settings()["policy"]
    rollouts.sort(key=lambda rollout: (rollout.task, rollout.identity.order))
    tasks = CollectedTasks(asked_again=run.progress.tasks.asked_again, failed_as=failed_as)
    for rollout in rollouts:
        tasks.add(score_of(rollout))
    metrics = summary_rows(tasks, ks)
    notes = [*notes_on(tasks)]
    if is_example(run.names) and any(row["mean_reward"] is not None for row in metrics):
        notes.insert(0, example_note(metrics[-1]["tasks"]))
    for line in (*(row["account"] for row in metrics[-1:]), *notes) if progress else ():
        log(line)
    # The run has logged these.
    notes += [*(f"left out: {error}" for error in run.plan.invalid), *run.plan.warnings]
    return Evaluation(
        rollouts,
        metrics,
        notes,
        model=policy_name(settings_of_policy),
        run=None if run.directory is None else str(run.directory),
        failed_as=failed_as,
    )


@contextlib.contextmanager
def _showing(progress: bool) -> Iterator[tuple[Show, Log]]:
    if not progress:
        yield ignore, ignore
        return
    with showing_progress() as output:
        yield output
