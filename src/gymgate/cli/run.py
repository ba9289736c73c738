"""`gymgate run`: rollouts of NeMo Gym environments with a policy, in a directory that a later run resumes, or only counted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gymgate.cli.conversations import conversation_text
from gymgate.cli.options import (
    ENDPOINT_OPTIONS,
    FILE,
    GroupedCommand,
    add_options,
    complete_environments,
    data_option,
    env_option,
    field_option,
    is_on_line,
    option,
    parsed,
    price_option,
    repeats_option,
    replay_file_option,
    rows_option,
    shard_option,
)
from gymgate.cli.output import echo, print_json
from gymgate.cli.rollout_commands import CONDUCT_OPTIONS, conduct, finish, showing_run
from gymgate.cli.run_spec import spec_of
from gymgate.core.config import RayCluster
from gymgate.core.errors import ConfigError
from gymgate.gym.runtime import open_catalog
from gymgate.results.spans import RolloutTracer
from gymgate.runs.collected.prepare import prepare, refuse_missing
from gymgate.runs.collected.store import checked_output
from gymgate.runs.described.plan import WHOLE, Shard, parse_seeds
from gymgate.runs.described.spec import RunSpec
from gymgate.stack.ray.nodes import require_ray

KEPT_ONLY = ("shard", "retries", "rerun_failed", "bodies", "sync_every")
"""Options that need a directory."""


SHOWN_OPTIONS = (
    *("--data", "-n", "-r"),
    *("-b", "-m", "--sampling", "--api-key-var"),
    *("--judge", "--judge-key-var", "--set", "-c", "--timeout"),
    *("-o", "-k", "--wide", "--rerun-failed", "--price", "--show"),
)
"""Options that `--help` lists: those of a first evaluation, and those that messages name most."""


@click.command("run", cls=GroupedCommand, shown=SHOWN_OPTIONS)
@click.argument(
    "arguments",
    nargs=-1,
    metavar="ENV...|FILE.jsonl",
    shell_complete=complete_environments,
)
@data_option
@rows_option
@repeats_option
@field_option(
    "Rows",
    RunSpec,
    "seeds",
    callback=parsed(parse_seeds),
    multiple=False,
    metavar="N|LIST",
    help="Seeds sent to the policy: 4 is 0-3; or a list, 3,5,7-9.",
)
@env_option("named", "Environment of FILE's rows.", "found by their agent_ref")
@shard_option
@option(
    "Rows",
    "--spec",
    type=FILE,
    metavar="FILE",
    help="Describe the run by a TOML or JSON file, as --dry-run prints it. Options override it.",
)
@add_options(ENDPOINT_OPTIONS)
@replay_file_option
@field_option(
    "Environment",
    RayCluster,
    "address",
    "--ray",
    metavar="ADDRESS",
    default=None,
    help="Run on a Ray cluster, a stack per node: auto, or HOST:PORT.",
)
@field_option("Environment", RayCluster, "cpus_per_stack", metavar="N")
@option(
    "Output",
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the rollouts in a directory, where the same command resumes. [only the table]",
)
@add_options(CONDUCT_OPTIONS)
@price_option
@option(
    "Output",
    "--otel",
    is_flag=True,
    help="Export each rollout as OpenTelemetry spans; the OTEL_* variables say where to.",
)
@option(
    "Output",
    "--show",
    "is_shown",
    is_flag=True,
    help="Print each rollout as it finishes: the conversation, the expected answer, the extracted one, the reward.",
)
@option("Output", "--dry-run", is_flag=True, help="Print the run's description; start nothing.")
@click.pass_context
def command(
    context: click.Context,
    /,
    as_json: bool,
    budget: float | None,
    dry_run: bool,
    is_shown: bool,
    ks: Sequence[int] | None,
    log_to: str | None,
    otel: bool,
    output: Path | None,
    rerun_failed: bool,
    shard: Shard | None,
    wide: bool,
    failed_as: float | None,
    **_: Any,
) -> None:
    """Run rows with a policy, score them, and print a table.

    Several ENVs run in one stack; each row of a FILE, or of --data FILE with several ENVs, then has its agent
    (agent_ref). With -o DIR rollouts are kept, failed ones are retried, and the same command runs what is missing after a
    kill or a crash. Without it nothing is kept or retried. Exits with 1 if a rollout failed or a row could not be read, 75
    if stopped early on request, 130 if interrupted, after a table of what was done.

    \b
    gymgate run mcqa -r 4
    gymgate run mcqa -o runs/x -r 16 -c 256 -b http://host:8000/v1
    """
    if output is None:
        _refuse_without_directory(context)
    else:
        checked_output(output)
    tracing = RolloutTracer() if otel else contextlib.nullcontext()
    with showing_run() as (show, progress_log), tracing as tracer:
        spec = spec_of(context, progress_log)
        if dry_run:
            catalog = open_catalog(spec.stack.runtime, spec.stack.component_roots, progress=progress_log)
            refuse_missing(spec.stack.environments, spec.data, catalog)
            print_json(spec.document())
            return
        if spec.stack.ray is not None:
            require_ray()
        if output is None:
            spec = spec.model_copy(update={"pace": spec.pace.model_copy(update={"budgets": {}})})
        run = prepare(spec, output=output, shard=shard or WHOLE, rerun_failed=rerun_failed, log=progress_log)
        run.tracer = tracer
        to = progress_log if as_json else echo  # stdout, where the table is
        show_rollout = (lambda rollout: to(conversation_text(rollout))) if is_shown else None
        end = conduct(run, show, budget, log_to=log_to, show_rollout=show_rollout, failed_as=failed_as)
    finish(run, end, output, ks=ks, as_json=as_json, wide=wide)


def _refuse_without_directory(context: click.Context) -> None:
    """Raises `ConfigError` for options that say how a directory is kept."""
    if options := [
        option.opts[-1]
        for option in context.command.params
        if option.name in KEPT_ONLY and is_on_line(context, option.name)
    ]:
        raise ConfigError(f"{' and '.join(options)} needs a directory that keeps the rollouts: -o DIR")
