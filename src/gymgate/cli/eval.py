"""`gymgate eval run`: verifiers' own eval, with the local runtime, a policy without a key, and a closing table."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from typing import Any
from urllib.parse import urlparse

import click

from gymgate.cli.eval_args import REPLAY_KEY_VARIABLE, is_replayed, read_settings, verifiers_args
from gymgate.cli.options import (
    DEFAULT_KEY_VARIABLE,
    ENVIRONMENT_OPTIONS,
    add_options,
    api_key_var_option,
    base_url_option,
    checked_url,
    concurrency_option,
    data_option,
    gym_option,
    k_option,
    model_option,
    repeats_option,
    rows_option,
    sampling_option,
    wide_option,
)
from gymgate.cli.output import log
from gymgate.cli.policies import asked_endpoint
from gymgate.collection.metrics import parse_ks
from gymgate.config import HTTPEndpoint
from gymgate.errors import ConfigError
from gymgate.integrations.knobs import DEFAULT_ENVIRONMENT, Knobs
from gymgate.integrations.verifiers.knobs import PLUGIN_ID, knobs_of, require_verifiers
from gymgate.stack.needs import require_needs

EPILOG = """All other options go to verifiers unchanged: `vf-eval nemo-gym-env --help` lists them, and `@ FILE` reads
them from TOML or JSON. --data, --judge, --timeout and the like are short for `--env.taskset.*`."""


@click.group("eval")
def command() -> None:
    """Evaluate a model through an SDK's own eval."""


@command.command("run", epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[TASKSET] [VERIFIERS OPTIONS]")
@click.option(
    "--env",
    "environments",
    multiple=True,
    metavar="ENV",
    help=f"NeMo Gym environment. Repeatable. [{DEFAULT_ENVIRONMENT}]",
)
@data_option
@rows_option
@repeats_option
@concurrency_option
@base_url_option
@model_option
@api_key_var_option
@sampling_option
@add_options(ENVIRONMENT_OPTIONS)
@gym_option
@click.option(
    "-o", "--output", metavar="DIRECTORY", help="Write the run to a directory in this one. [outputs]"
)
@k_option
@wide_option
@click.option("--push", is_flag=True, help="Upload the results to the Prime Intellect platform.")
@click.option(
    "--resume", metavar="RUN_DIR", help="Run what a saved run still lacks; takes no other settings."
)
@click.pass_context
def run(context: click.Context, /, args: tuple[str, ...], ks: str | None, wide: bool, **options: Any) -> None:
    """Run NeMo Gym environments through verifiers' eval; TASKSET is nemo-gym-env unless you name another.

    Without an endpoint (-b) the recorded rollouts that NeMo Gym ships are replayed: no model, no key. Without --rows the
    default environment runs one row, every other environment all of its rows.
    """
    require_verifiers()
    table = {"ks": parse_ks(ks) if ks else None, "wide": wide}
    default = click.core.ParameterSource.DEFAULT
    given = [name for name in options if context.get_parameter_source(name) != default]
    argv = verifiers_args(args, options, given)
    settings = read_settings(argv)
    if settings.get("env.taskset.id") != PLUGIN_ID:
        sys.exit(_evaluate(argv, table))
    knobs, replayed = knobs_of(settings), is_replayed(settings)
    with ExitStack() as exits:
        policy_args = exits.enter_context(_policy(knobs, settings))
        if not (settings.get("dry_run") or knobs.ray or {"-h", "--help"} & {*argv}):
            from gymgate.integrations.stacks import starting_early

            exits.enter_context(starting_early(knobs.stack_config(), log))
        code = _evaluate([*argv, *policy_args], table, replayed=replayed)
    sys.exit(code)


@contextmanager
def _policy(knobs: Knobs, settings: Mapping[str, Any]) -> Iterator[list[str]]:
    """Check endpoint, environments and judges; yield the arguments for the policy.

    Without an endpoint a replay server runs meanwhile. Raises `ConfigError` or `NeedMissingError` for what would fail
    later, before verifiers is imported.
    """
    url, model = settings.get("client.base_url"), settings.get("model") or settings.get("m")
    replayed = is_replayed(settings)
    if model and not url:
        raise ConfigError(f"model {model!r} needs an endpoint: -b http://host:8000/v1")
    if replayed:
        names = ", ".join(knobs.environment_names())
        log(f"policy: recorded answers of {names}, replayed (no model is called); -b URL names an endpoint")
    args = [] if replayed else _endpoint_args(settings, checked_url(str(url)), model, ask=knobs.ray is None)
    found = knobs.find_environments(log)
    require_needs(knobs.stack_config(), [*found.values()], replayed=replayed)
    if not replayed:
        yield args
        return
    from gymgate.cli.serve import ReplayServer

    # The policy of a resumed run comes back at the port that its saved settings name.
    port = (urlparse(str(url)).port if url else None) or 0
    runtime = knobs.stack_config().runtime
    with ReplayServer(knobs.environment_names(), port=port, runtime=runtime) as server:
        address = ["--client.base-url", server.base_url]  # also tells a resumed run that its port is taken
        key = ["--client.api-key-var", REPLAY_KEY_VARIABLE]
        yield [] if url else [*address, *key, "--model", "replay"]


def _endpoint_args(settings: Mapping[str, Any], url: str, model: str | None, *, ask: bool) -> list[str]:
    """Ask the endpoint; return the key's variable and the model's name, as far as the settings leave them open."""
    variable = str(settings.get("client.api_key_var") or DEFAULT_KEY_VARIABLE)
    args = [] if "client.api_key_var" in settings else ["--client.api-key-var", variable]
    # Headers of verifiers' client, which we do not read, may hold the key.
    if not model or (ask and not any(name.startswith("client.headers") for name in settings)):
        endpoint = HTTPEndpoint(
            base_url=url,
            model=model,
            dialect=settings.get("env.taskset.dialect", "chat"),
            api_key_env=variable if os.environ.get(variable) else None,
        )
        asked = asked_endpoint(endpoint, 0, log)
        args += [] if model else ["--model", str(asked.model)]
    return args


def _evaluate(argv: list[str], table: Mapping[str, Any], *, replayed: bool = False) -> int:
    """Run verifiers' eval and print the closing table, with the options `table`; return the exit code, 1 if rollouts failed."""
    log("loading verifiers")
    from verifiers.v1.cli.eval.main import main

    from gymgate.cli.eval_report import TRACES, print_report, read_metrics, watch  # while the stack starts

    started, code = time.time(), 0
    # Away from a terminal verifiers' dashboard prints one frame at the end, with a line for each rollout.
    frame = None if sys.stdout.isatty() or "--no-rich" in argv else io.StringIO()
    with watch() as watcher, redirect_stdout(frame) if frame else nullcontext():
        try:
            main(argv)
        except SystemExit as error:
            code = _exit_code(error)
    if watcher.run is None or not (watcher.run / TRACES).is_file():
        click.echo(frame.getvalue() if frame else "", nl=False)  # help, or that there is nothing to resume
        return code
    environments, tasks = read_metrics(watcher.run, since=started)
    code = code or int(any(metrics.failed for metrics in environments.values()))
    print_report(environments, tasks, watcher.run, table, replayed=replayed, complete=code == 0)
    return code


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, str):
        raise ConfigError(error.code) from None
    return error.code or 0
