"""`gymgate.collect`: a run's rollouts in Python, each as soon as it has finished."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gymgate.core.config import EnvironmentConfig, RolloutLimits, RuntimeConfig, StackConfig, checked
from gymgate.core.errors import ConfigError
from gymgate.gym.row_sources import RowSource, open_sources
from gymgate.gym.runtime import open_catalog
from gymgate.rollouts.row import make_row
from gymgate.runs.collected.policies import ask_models
from gymgate.runs.collected.run import Collection, Log, ignore
from gymgate.runs.collected.tracing import Tracer
from gymgate.runs.counted.aggregate import rollouts_of as stored_rollouts_of
from gymgate.runs.counted.aggregate import runs_at
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.plan import IdentitySet, PlannedIdentities, RolloutPlan, checked_shard
from gymgate.runs.described.settings import extent_of
from gymgate.runs.stored.record import CollectedRollout
from gymgate.stack import Policy
from gymgate.stack.client.stack import checked_policy
from gymgate.stack.description import stack_settings

Environments = str | EnvironmentConfig | Sequence[str | EnvironmentConfig] | StackConfig
"""Names or configs of environments, or the config of a whole stack."""
Rows = str | Path | Iterable[Mapping[str, Any]]
"""A packaged file's name, a path, `hf:owner/name[:split]`, or rows."""


async def collect(
    environments: Environments,
    rows: Rows = "example",
    *,
    policy: Policy,
    output: str | Path | None = None,
    repeats: int = 1,
    seeds: int | Sequence[int] | None = None,
    shard: tuple[int, int] = (1, 1),
    limit: int | None = None,
    limits: RolloutLimits | None = None,
    pace: Pace | None = None,
    concurrency: int | None = None,
    rerun_failed: bool = False,
    record_bodies: bool = False,
    wait_for_policy_s: float | None = None,
    include_finished: bool = True,
    runtime: RuntimeConfig | None = None,
    tracer: Tracer | None = None,
    progress: Log = ignore,
) -> AsyncGenerator[CollectedRollout, None]:
    """Yield the rollouts of rows x seeds x repeats, each as soon as it has finished or failed.

    A failed rollout is retried within `pace.budgets`. Its last attempt is yielded: `reward` is `None`, and `error` says why.
    Others have no reward either if no number counts (`outcome_of` says which), so leave `None` out before you average.

    With `output`, a directory, each is appended to it first. After a kill, the same call yields what is there already, failed
    ones included (unless `include_finished` is false; `rerun_failed` runs failed ones again), and then runs what is missing.

    `rows` is a packaged file's name, a path, `hf:owner/name[:split]` or dicts; `limit` is how many of each source to
    take; `seeds` is a number of them or a list. An endpoint without a model is asked for the one that it serves, as
    `gymgate run` does. `wait_for_policy_s` is how long the policy's endpoint may take to answer, at the start and after
    its failures: 0 asks it once, `None` never. `tracer`, e.g. a `RolloutTracer`, gets what is run. `progress` gets messages.

    To stop early, close the generator: `async with contextlib.aclosing(gymgate.collect(...)) as rollouts`.
    Raises `ConfigError` for an output that holds a run with other settings or that another process writes, before the
    first rollout, `DataError` if it cannot be written, and the last error if `pace.failures_in_a_row` rollouts fail.
    """
    run = await open_collection(
        environments,
        rows,
        policy=policy,
        output=output,
        repeats=repeats,
        seeds=seeds,
        shard=shard,
        limit=limit,
        limits=limits,
        pace=pace,
        concurrency=concurrency,
        rerun_failed=rerun_failed,
        record_bodies=record_bodies,
        wait_for_policy_s=wait_for_policy_s,
        runtime=runtime,
        tracer=tracer,
        progress=progress,
    )
    async with contextlib.aclosing(rollouts_of(run, include_finished=include_finished)) as rollouts:
        async for rollout in rollouts:
            yield rollout


@checked
async def open_collection(
    environments: Any,
    rows: Any,
    *,
    policy: Any,
    output: str | Path | None = None,
    repeats: int = 1,
    seeds: int | Sequence[int] | None = None,
    shard: tuple[int, int] = (1, 1),
    limit: Annotated[int, Field(ge=1)] | None = None,
    limits: RolloutLimits | None = None,
    pace: Pace | None = None,
    concurrency: Annotated[int, Field(ge=1)] | None = None,
    rerun_failed: bool = False,
    record_bodies: bool = False,
    wait_for_policy_s: float | None = None,
    runtime: RuntimeConfig | None = None,
    tracer: Any = None,
    progress: Log = ignore,
    ask_known: bool = False,
) -> Collection:
    """Return the run that `collect` is asked for, before it starts. Raises as `collect` does before the first rollout.

    With `ask_known`, endpoints with a known model are asked for it, too, as `gymgate run` does.
    """
    if isinstance(environments, StackConfig):
        stack = environments
    else:
        stack = StackConfig(environments=environments, runtime=runtime or RuntimeConfig())
    policy = checked_policy(policy)
    stack, endpoint = await ask_models(stack, policy, wait_for_policy_s or 0, progress, known=ask_known)
    assert endpoint is not None
    sources, settings = await asyncio.to_thread(_sources, stack, rows, limit)
    pace = pace or Pace()
    plan = await asyncio.to_thread(
        RolloutPlan,
        sources,
        repeats=repeats,
        seeds=range(seeds) if isinstance(seeds, int) else seeds,
        shard=checked_shard(*shard),
    )
    return Collection(
        stack=stack,
        policy=endpoint,
        plan=plan,
        names=[str(rows) if isinstance(rows, str | Path) else "rows"],
        stack_settings=settings,
        output=Path(output) if output is not None else None,
        limits=limits or RolloutLimits(),
        pace=pace if concurrency is None else pace.model_copy(update={"concurrency": concurrency}),
        rerun_failed=rerun_failed,
        record_bodies=record_bodies,
        wait_for_policy_s=wait_for_policy_s,
        tracer=tracer,
        log=progress,
    )


async def rollouts_of(
    run: Collection, *, include_finished: bool = True
) -> AsyncGenerator[CollectedRollout, None]:
    """Run it and yield its rollouts, those of earlier runs in its directory first.

    A slow consumer holds the run up: while `concurrency` results wait for it, no rollout starts.
    """
    queue: asyncio.Queue[CollectedRollout | None] = asyncio.Queue()
    room = asyncio.Event()
    room.set()

    def tell(rollout: CollectedRollout) -> None:
        queue.put_nowait(rollout)
        if queue.qsize() >= run.pace.concurrency:
            room.clear()

    async def put_finished() -> None:
        if not include_finished or run.directory is None:
            return
        planned, ended = PlannedIdentities(run.plan.row_keys(), extent_of(run.plan)), IdentitySet()
        for attempt in stored_rollouts_of(runs_at(run.directory), failed=not run.rerun_failed):
            if attempt.identity in planned and ended.add(attempt.identity):
                tell(attempt.rollout())
                await room.wait()

    async def work() -> None:
        try:
            await run.run(on_rollout=tell, before_rollout=room.wait, on_open=put_finished)
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(work())
    try:
        while (rollout := await queue.get()) is not None:
            if queue.qsize() < run.pace.concurrency:
                room.set()
            yield rollout
        await task
    finally:
        run.drain()  # a stack that is lost while the run is cancelled is not started again
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _sources(stack: StackConfig, rows: Rows, limit: int | None) -> tuple[list[RowSource], dict[str, Any]]:
    """Return the rows, and what can be known of the stack before it is up."""
    if isinstance(rows, int):
        raise ConfigError(f"rows={rows} is not rows; limit={rows} takes the first {rows} of each source")
    catalog = open_catalog(stack.runtime, stack.component_roots)
    environments = catalog.environments_of(stack.environments)
    settings = stack_settings(stack, catalog, environments) if stack.server is None else {}
    if isinstance(rows, str | Path):
        return open_sources(str(rows), environments, limit), settings
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise ConfigError(f"rows must be a name, a path or a list of dicts, not {type(rows).__name__}")
    copies = (dict(row) if isinstance(row, Mapping) else row for row in rows)
    numbered = [make_row(row, "rows", number) for number, row in enumerate(copies, 1)]
    environment = next(iter(environments)) if len(environments) == 1 else None
    return [RowSource(numbered, environment, limit)], settings
