"""`gymgate rescore`: stored rollouts, played again through agent, tools and scoring without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gymgate.cli.environments import environment_configs
from gymgate.cli.options import (
    GroupedCommand,
    add_options,
    dataset_option,
    env_option,
    is_on_line,
    option,
    shard_option,
)
from gymgate.cli.output import Log
from gymgate.cli.rollout_commands import CONDUCT_OPTIONS, conduct, finish, showing_run
from gymgate.cli.run_spec import catalog_of, overridden
from gymgate.core.config import SUPPORTED_NEMO_GYM, EnvironmentConfig, ReplayEndpoint
from gymgate.core.errors import ConfigError, DivergedError
from gymgate.gym.catalog import Catalog, Environment
from gymgate.gym.open_needs import require_needs
from gymgate.gym.runtime import open_catalog
from gymgate.results.rescore import Rescoring, StoredRun
from gymgate.runs.collected.policies import ask_models
from gymgate.runs.collected.prepare import environment_of
from gymgate.runs.described.plan import WHOLE, Shard
from gymgate.runs.described.spec import RunSpec
from gymgate.stack.description import stack_settings

SHOWN_OPTIONS = (
    *("--judge-failed", "--env", "--judge", "--judge-key-var"),
    *("--set", "--config", "--sandbox", "--env-var", "--gym"),
    *("-c", "--timeout", "-o", "-k", "--wide", "--rerun-failed", "--json"),
)
"""Options that `--help` lists."""


@click.command("rescore", cls=GroupedCommand, shown=SHOWN_OPTIONS)
@click.argument("stored", metavar="RUN", type=click.Path(path_type=Path))
@option("Rows", "--judge-failed", is_flag=True, help="Only rollouts with a failed judge.")
@env_option(
    "named",
    "Environment that plays the rollouts, e.g. the path of a config file.",
    "the packaged ones of RUN",
)
@dataset_option
@shard_option
@add_options(CONDUCT_OPTIONS)
@option(
    "Output",
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of the new run, where the same command resumes.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    stored: Path,
    output: Path,
    judge_failed: bool,
    named: tuple[str, ...],
    datasets: tuple[str, ...],
    shard: Shard | None,
    rerun_failed: bool,
    budget: float | None,
    ks: Sequence[int] | None,
    log_to: str | None,
    as_json: bool,
    wide: bool,
    failed_as: float | None,
    **_: Any,
) -> None:
    """Play stored rollouts again, and score them anew. No model is called.

    RUN is a directory of gymgate run, or a rollouts.jsonl of NeMo Gym's collector. Each rollout goes through its agent,
    tools and scoring once more, with the settings of RUN and those given here: another release, config, judge or code. A
    rollout that does not go exactly as recorded is diverged: it has no reward and counts as failed. Judges are asked again, so
    they need their endpoints. Exits as gymgate run.

    RUN may come from somebody else, so it does not decide which code runs: an environment or a config by path, an environment
    that runs code of answers or rows, a sandbox and settings are used only if --env, --config, --sandbox and --set give
    them here, too. Nor is a dataset of rows loaded unless --dataset gives it.

    \b
    gymgate rescore runs/base -o runs/base-0.6 --gym 0.6.0
    gymgate rescore runs/base -o runs/strict --set mcqa.resources_servers.mcqa.KEY=VALUE
    gymgate compare runs/base runs/strict
    """
    with showing_run() as (show, log):
        run = StoredRun(stored, judge_failed_only=judge_failed, datasets=datasets)
        for count, what in (
            (run.silent, "are stored without the whole of what the policy said, and are left out"),
            (run.twice, "are stored twice, and are taken once"),
        ):
            if count:
                log(f"{stored}: {count} rollouts {what}")
        stored_environments = {config["name"]: config for config in run.settings.get("environments", ())}
        spec = _spec(context, run, named, stored_environments, log)
        policy = ReplayEndpoint(rollouts=(str(stored),))
        stack = asyncio.run(ask_models(spec.stack, policy, 0, log))[0]
        catalog = open_catalog(stack.runtime, stack.component_roots, progress=log)
        try:
            environments = catalog.environments_of(stack.environments)
        except ConfigError as error:
            if named:
                raise
            raise ConfigError(f"{error}; for your own, give its path: --env PATH") from error
        _refuse_code_of_run(
            context, run, named, stack.environments, environments, stored_environments, catalog
        )
        require_needs(stack, environments.values(), replayed=True)
        rescoring = Rescoring(
            stack=stack,
            policy=policy,
            plan=run.plan(shard or WHOLE),
            names=[str(stored)],
            stack_settings=stack_settings(stack, catalog, environments),
            limits=spec.limits,
            pace=spec.pace,
            record_bodies=spec.record_bodies,
            output=output,
            rerun_failed=rerun_failed,
            log=log,
            stored=run,
        )
        end = conduct(rescoring, show, budget, log_to=log_to, failed_as=failed_as)
    diverged = sum(
        count
        for cause, count in rescoring.progress.tasks.counts.causes.items()
        if cause.startswith(DivergedError.__name__)
    )
    note = f"{diverged} of {rescoring.progress.total} rollouts diverged from what was recorded: they have no reward"
    finish(
        rescoring,
        end,
        output,
        ks=ks,
        as_json=as_json,
        wide=wide,
        base=stored,
        note=note if diverged else "",
    )


def _spec(
    context: click.Context,
    run: StoredRun,
    named: tuple[str, ...],
    stored: Mapping[str, Mapping[str, Any]],
    log: Log,
) -> RunSpec:
    """Return the stack, limits and pace of the new run: those of the stored one, with the options' values.

    `stored` are the settings of its environments by name. Raises `ConfigError` for an environment that is not known.
    """
    settings = run.settings
    stack: dict[str, Any] = {}
    file: dict[str, Any] = {"stack": stack}
    if settings:
        stack["runtime"] = {"version": settings["nemo_gym"]}
        if (interpreter := settings.get("interpreter")) is not None and not is_on_line(context, "gym"):
            raise ConfigError(
                f"{run.path} ran in its own interpreter; give it here to use it: "
                f"--gym {settings['nemo_gym']}@{interpreter}"
            )
        if settings["nemo_gym"] not in SUPPORTED_NEMO_GYM and not is_on_line(context, "gym"):
            raise ConfigError(
                f"{run.path} ran on nemo-gym {settings['nemo_gym']}, which gymgate was not tested with; give a release here: "
                f"--gym {settings['nemo_gym']}, or --gym {SUPPORTED_NEMO_GYM[0]}"
            )
        stack["models"] = {
            name: judge for name, judge in settings.get("judges", {}).items() if isinstance(judge, str)
        }
        file["limits"] = settings["limits"]
    names: list[str] = [*(named or stored)]
    if not names:
        names = run.environments
        if run.is_gym:
            catalog = catalog_of(context, file, log)
            names = sorted(
                {environment_of(agent, catalog, str(run.path), "--env ENV") for agent in run.environments}
            )
    spec = overridden(context, file, names)
    if not stored:
        return spec
    kept_under: Iterable[str] = stored
    if named:  # a path is another name for what the run knows by its own
        kept_under = open_catalog(
            spec.stack.runtime, spec.stack.component_roots, progress=log
        ).environments_of(spec.stack.environments)
    chosen = (
        {name: value for name, value in stored.get(key, {}).items() if name != "content"}
        for key in kept_under
    )
    return overridden(
        context, file, [{**settings, "name": name} for name, settings in zip(names, chosen, strict=True)]
    )


def _refuse_code_of_run(
    context: click.Context,
    run: StoredRun,
    named: tuple[str, ...],
    configs: Sequence[EnvironmentConfig],
    environments: Mapping[str, Environment],
    stored: Mapping[str, Mapping[str, Any]],
    catalog: Catalog,
) -> None:
    """Refuse files and settings that RUN names and the command line does not: they decide which code runs.

    Raises `ConfigError` with the options that would use them, and for an environment of one's own whose name is the release's.
    """
    from_options = environment_configs(context, [config.name for config in configs])
    missing: list[str] = []
    for (name, environment), config, options in zip(environments.items(), configs, from_options, strict=True):
        settings = stored.get(name, {})
        prefix = f"{config.name}:" if len(configs) > 1 else ""
        if config.name not in named:
            if not _is_in(environment.path, catalog):
                missing.append(f"--env {config.name}")
            elif environment.path.is_relative_to(catalog.site) and _has_own_code(settings):
                missing.append(f"--env PATH, since its {name!r} is not the release's")
            elif (chosen_config := environment.config(config.config)).runs_code or chosen_config.runs_rows:
                missing.append(
                    f"--env {config.name}, which runs code of the run's answers or rows with your rights"
                )
        if config.config is not None and options.config is None:
            files = environment.config(config.config).all_files
            chosen = (config.config,) if isinstance(config.config, str) else config.config
            missing += [
                f"--config {name}" for name in chosen if not all(_is_in(file, catalog) for file in files)
            ]
        sandbox = settings.get("sandbox")
        if sandbox is not None and not is_on_line(context, "sandbox"):
            missing.append(f"--sandbox {sandbox}")
        overrides, repeated = dict(config.overrides), dict(options.overrides)
        missing += [f"--set {prefix}{key}={value}" for key, value in overrides.items() if key not in repeated]
    if missing:
        raise ConfigError(
            f"{run.path} names environments, files or settings that decide which code runs; give them here to use them: "
            f"{' '.join(missing)}"
        )


def _has_own_code(settings: Mapping[str, Any]) -> bool:
    """Whether an environment of a run, by its settings, was somebody's own, not one of the release with their config."""
    content = settings.get("content")
    return isinstance(content, Mapping) and any("/" in name for name in content)


def _is_in(path: Path, catalog: Catalog) -> bool:
    """Whether a file is the release's, or below a directory that the command line gives."""
    return any(path.resolve().is_relative_to(root.resolve()) for root in catalog.roots)
