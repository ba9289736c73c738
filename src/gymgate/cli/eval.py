"""`gymgate eval run`: verifiers' own eval, with the local runtime, a policy without a key, and a closing table."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlparse

import click
from pydantic import ValidationError

from gymgate.cli.environments import environment_configs, parse_judges
from gymgate.cli.metrics_tables import print_causes, print_results
from gymgate.cli.options import (
    ENVIRONMENT_OPTIONS,
    GroupedCommand,
    add_options,
    api_key_var_option,
    base_url_option,
    checked_url,
    complete_environments,
    concurrency_option,
    data_option,
    gym_option,
    k_option,
    model_option,
    option,
    repeats_option,
    rows_option,
    sampling_option,
    wide_option,
)
from gymgate.cli.output import log
from gymgate.cli.policies import endpoint_list, sampling_fields
from gymgate.core.config import DEFAULT_KEY_VARIABLE, HTTPEndpoint, validation_message
from gymgate.core.errors import ConfigError
from gymgate.gym.open_needs import require_needs
from gymgate.integrations.eval_options import DEFAULT_ENVIRONMENT, EvalOptions
from gymgate.integrations.verifiers import PLUGIN_ID, require_verifiers
from gymgate.runs.counts import RolloutCounts
from gymgate.runs.metrics import parse_ks, summary_rows
from gymgate.runs.policies import ask_judges, asked_endpoint

if TYPE_CHECKING:
    from verifiers.v1.configs.cli.eval import EvalConfig

EPILOG = """All other options go to verifiers unchanged: `vf-eval nemo-gym-env --help` lists them, and `@ FILE` reads
them from TOML or JSON. --data, --judge, --timeout and the like are short for `--env.taskset.*`."""
REPLAY_KEY_VARIABLE = "GYMGATE_REPLAY_KEY"
"""API key variable of an eval that replays recorded rollouts. It is never set; a resumed run is recognised by it."""
SETTINGS = {
    "data": "data",
    "sandbox": "sandbox",
    "routing": "routing",
    "gateway_host": "gateway_host",
    "agent": "agent",
    "timeout": "timeout_s",
    "agent_processes": "agent_processes",
    "max_calls": "max_calls",
}
"""Option -> setting of the taskset with the same value."""
FLAGS = {
    "rows": "-n",
    "repeats": "-r",
    "concurrency": "-c",
    "output": "--output-dir",
    "api_key_var": "--client.api-key-var",
    "model": "--model",
}
"""Option -> flag of verifiers with the same value."""
UNREAD = ("@", "--env.taskset", "--client", "--dry-run")
"""Beginnings of arguments that verifiers alone reads and that may change the stack or the policy."""


@click.group("eval")
def command() -> None:
    """Evaluate a model through an SDK's own eval."""


@command.command("run", cls=GroupedCommand, epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[TASKSET] [VERIFIERS OPTIONS]")
@option(
    "Rows",
    "--env",
    "environments",
    multiple=True,
    metavar="ENV",
    shell_complete=complete_environments,
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
@option(
    "Output",
    "-o",
    "--output",
    metavar="DIRECTORY",
    help="Write the run to a directory in this one. [outputs]",
)
@k_option
@wide_option
@option("Output", "--push", is_flag=True, help="Upload the results to the Prime Intellect platform.")
@option(
    "Output", "--resume", metavar="RUN_DIR", help="Run what a saved run still lacks; takes no other settings."
)
@click.pass_context
def run(context: click.Context, /, args: tuple[str, ...], ks: str | None, wide: bool, **options: Any) -> int:
    """Run NeMo Gym environments through verifiers' eval; TASKSET defaults to nemo-gym-env.

    Without an endpoint (-b) the recorded rollouts that NeMo Gym ships are replayed: no model, no key. Without --rows the
    default environment runs one row, every other environment all of its rows.

    \b
      gymgate eval run
      gymgate eval run --env mcqa --env citation_if -b http://localhost:8000/v1 -n 50 -r 4
    """
    require_verifiers()
    default = click.core.ParameterSource.DEFAULT
    names_given = [name for name in options if context.get_parameter_source(name) != default]
    line = read_line(args, options, names_given)
    table = {"ks": parse_ks(ks) if ks else None, "wide": wide}
    with contextlib.ExitStack() as exits:
        policy = None
        if (eval_options := line.eval_options) is not None:
            policy = check_policy(eval_options, line.url, options["model"], options["api_key_var"])
            line = with_judges(line, policy)
            eval_options = line.eval_options or eval_options
            if eval_options.ray is None:
                from gymgate.integrations.stacks import starting_early

                exits.enter_context(starting_early(eval_options.run_spec().stack, log))
        log("loading verifiers")
        from gymgate.integrations.verifiers import evaluation

        exits.enter_context(_one_line())
        sampling = dict(sampling_fields(options["sampling"]))
        config = evaluation.parse_settings(line.argv, options["concurrency"], sampling)
        if config.resume and not options["resume"]:
            raise ConfigError("a saved run is resumed with --resume RUN_DIR")
        if (eval_options := evaluation.taskset_of(config)) is not None:
            policy = policy or check_policy(eval_options, **evaluation.policy_of(config))
            if policy.replayed:
                policy = exits.enter_context(_replaying(eval_options, policy))
        path = evaluation.complete(config, policy and policy[:3])
        return _evaluate(config, path, table, replayed=policy is not None and policy.replayed)


class Line(NamedTuple):
    """What a command line says."""

    argv: list[str]
    """verifiers' command line for it."""
    eval_options: EvalOptions | None = None
    """The settings of the taskset, if verifiers' own arguments and files cannot change them or the policy."""
    url: str | None = None


def read_line(args: Sequence[str], options: Mapping[str, Any], given: Collection[str]) -> Line:
    """Return what `args`, which are for verifiers, and our options say.

    `given` are the names of the options on our command line. The others hold defaults, which must not override a config
    file. Raises `ConfigError` for options that do not fit the taskset or one another.
    """
    if directory := options["resume"]:
        if wrong := sorted({*given} - {"resume", "push"}) or [*args]:
            raise ConfigError(
                f"--resume takes every setting from the saved run; leave out {', '.join(wrong)}"
            )
        saved = Path(directory) / "configs" / "resolved" / "eval.json"
        if not saved.is_file():
            raise ConfigError(f"{directory!r} is not the directory of a saved run: {saved} does not exist")
        return Line(["@", str(saved), "--resume"])
    taskset = args[0] if args and not args[0].startswith(("-", "@")) else None
    elsewhere = any(arg.startswith(("@", "--env.taskset.id")) for arg in args)
    argv = [*args] if taskset or elsewhere else [PLUGIN_ID, *args]
    ours = argv[0].replace("_", "-") == PLUGIN_ID
    settings = _settings(options, given)
    if settings and taskset and not ours:
        raise ConfigError(
            f"{', '.join(settings)}: settings of {PLUGIN_ID}, which taskset {taskset!r} does not have"
        )
    flags = {flag: options[name] for name, flag in FLAGS.items() if name in given}
    flags |= {f"--env.taskset.{name.replace('_', '-')}": value for name, value in settings.items()}
    url, *replicas = endpoint_list(options["urls"]) if options["urls"] else [None]
    if replicas:
        raise ConfigError("verifiers calls one endpoint, and -b has several; `gymgate run` takes replicas")
    if url:
        flags["--client.base-url"] = url
    for flag, value in flags.items():
        argv += [flag, str(value) if value is None or isinstance(value, str) else json.dumps(value)]
    if not options["push"] and "--push" not in args:
        argv.append("--no-push")
    if not ours or any(arg.startswith(UNREAD) for arg in args):
        return Line(argv)
    try:
        return Line(argv, EvalOptions(**settings), url)
    except ValidationError as error:
        raise ConfigError(validation_message(error)) from None


def _settings(options: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the settings of the taskset that our options give."""
    settings = {name: options[parameter] for parameter, name in SETTINGS.items() if parameter in given}
    for parameter, name in (("environments", "env"), ("config", "config")):
        if options[parameter]:
            settings[name] = ",".join(options[parameter])
    if options["env_vars"]:
        settings["env_vars"] = [*options["env_vars"]]
    if "gym" in given:
        settings["gym"] = options["gym"].version
        if options["gym"].interpreter is not None:
            settings["interpreter"] = options["gym"].interpreter
    if options["judges"] or options["judge_key_vars"]:
        settings["models"] = {
            name: endpoint if isinstance(endpoint, str) else endpoint.model_dump(exclude_unset=True)
            for name, endpoint in parse_judges(options["judges"], options["judge_key_vars"]).items()
        }
    if options["settings"]:
        environments = options["environments"] or (DEFAULT_ENVIRONMENT,)
        first, *others = environment_configs(environments, (), None, options["settings"])
        if others:
            raise ConfigError("--set takes one environment here; give one --env, or use `gymgate run`")
        settings["overrides"] = dict(first.overrides)
    if "hang_timeout" in given:
        settings["hang_timeout_s"] = options["hang_timeout"] or None
    return settings


class Policy(NamedTuple):
    """The policy of an eval, as verifiers' client is told of it."""

    base_url: str
    key_variable: str
    model: str
    judges: Mapping[str, Any] = MappingProxyType({})
    """Settings of the judges whose model their endpoint told."""

    @property
    def replayed(self) -> bool:
        """Whether recorded answers are given; then the address is that of the saved run's server, or empty."""
        return self.key_variable == REPLAY_KEY_VARIABLE


def check_policy(
    eval_options: EvalOptions,
    url: str | None,
    model: str | None,
    key_variable: str | None,
    *,
    ask: bool = True,
) -> Policy:
    """Ask the endpoint, if there is one, and check environments and judges; return the policy.

    Raises `ConfigError`, `PolicyError` or `NeedMissingError`. Without `ask` a named model is believed.
    """
    if model and not url:
        raise ConfigError(f"model {model!r} needs an endpoint: -b http://host:8000/v1")
    if url is None or key_variable == REPLAY_KEY_VARIABLE:
        names = ", ".join(eval_options.environment_names())
        log(f"policy: recorded answers of {names}, replayed (no model is called); -b URL calls a model")
        policy = Policy(url or "", REPLAY_KEY_VARIABLE, model or "replay")
    else:
        variable = key_variable or DEFAULT_KEY_VARIABLE
        endpoint = HTTPEndpoint(
            base_url=checked_url(url),
            model=model,
            dialect=eval_options.dialect,
            api_key_env=variable if os.environ.get(variable) else None,
        )
        if model is None or (ask and eval_options.ray is None):
            endpoint = asked_endpoint(endpoint, 0, log)
        policy = Policy(url, variable, str(endpoint.model))
    stack = eval_options.run_spec().stack
    if ask and stack.is_local:
        asked = ask_judges(dict(stack.models), 0, log)
        known = dict(stack.models)
        judges = {
            name: endpoint.model_dump(exclude_unset=True)
            for name, endpoint in asked.items()
            if isinstance(endpoint, HTTPEndpoint) and endpoint != known[name]
        }
        policy = policy._replace(judges=judges)
    environments = eval_options.find_environments(log)
    require_needs(stack, [*environments.values()], replayed=policy.replayed)
    return policy


def with_judges(line: Line, policy: Policy) -> Line:
    """Return a line with the models that `check_policy` learnt from judges' endpoints; of two flags verifiers takes the last."""
    if line.eval_options is None or not policy.judges:
        return line
    models = {**line.eval_options.models, **policy.judges}
    options = line.eval_options.model_copy(update={"models": models})
    return line._replace(argv=[*line.argv, "--env.taskset.models", json.dumps(models)], eval_options=options)


@contextlib.contextmanager
def _replaying(eval_options: EvalOptions, policy: Policy) -> Iterator[Policy]:
    """Serve recorded answers; a resumed run's at the port that its settings have."""
    from gymgate.cli.serve import ReplayServer

    port = urlparse(policy.base_url).port or 0
    runtime = eval_options.run_spec().stack.runtime
    with ReplayServer(eval_options.environment_names(), port=port, runtime=runtime) as server:
        yield policy._replace(base_url=server.base_url)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Raise `ConfigError` where verifiers exits with a message."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, str):
            raise ConfigError(error.code) from None
        raise


def _evaluate(config: EvalConfig, path: Path, table: Mapping[str, Any], *, replayed: bool) -> int:
    """Run an eval in its directory and print its closing table; return the exit code, 1 if rollouts failed."""
    from gymgate.integrations.verifiers.evaluation import evaluate, metrics_of

    started = time.time()
    # Away from a terminal verifiers' dashboard prints one frame at the end, with a line for each rollout.
    frame = None if sys.stdout.isatty() or config.rich is None else io.StringIO()
    resume = f"  resume: gymgate eval run --resume {path}  (runs what failed or is missing)"
    try:
        with contextlib.redirect_stdout(frame) if frame else contextlib.nullcontext():
            episodes = evaluate(config, path, log)
    except KeyboardInterrupt:
        log(f"results: {path}\n{resume}")
        raise
    except SystemExit:
        click.echo(frame.getvalue() if frame else "", nl=False)  # that there is nothing to resume
        raise
    if not episodes:
        return 0
    environments, tasks = metrics_of(episodes, since=started)
    counts = RolloutCounts.total(environments.values())
    rates = {name: metrics.rate for name, metrics in environments.items()}
    rows = [
        {**row, "rollouts_per_s": rates.get(row["environment"])} for row in summary_rows(tasks, table["ks"])
    ]
    click.echo()
    print_results(rows, replayed=replayed, **table)
    print_causes(counts.causes)
    click.echo(f"results: {path}")
    log(
        f"  look:   {path / 'traces.jsonl'} has one rollout per line, {path / 'logs/latest/eval.log'} is the log"
    )
    if counts.failed:
        log(resume)
    if replayed:
        log("  next:   the same with your model: add -b http://host:8000/v1 -m MODEL")
    return int(counts.failed > 0)
