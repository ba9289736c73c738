"""`gymgate eval run`: verifiers' own eval, with the local runtime, a policy without a key, and a closing table."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from pydantic import ValidationError

from gymgate.cli.metrics_tables import Rows, accepted_answers, print_results
from gymgate.cli.options import (
    ENVIRONMENT_OPTIONS,
    GroupedCommand,
    add_options,
    api_key_var_option,
    base_url_option,
    concurrency_option,
    data_option,
    env_option,
    failed_as_option,
    gym_option,
    is_on_line,
    k_option,
    model_option,
    option,
    option_fields,
    repeats_option,
    rows_option,
    sampling_option,
    wide_option,
)
from gymgate.cli.output import echo, log, log_next
from gymgate.cli.texts import endpoint_list, parse_judges, parse_overrides
from gymgate.core.config import EnvironmentConfig, RolloutLimits, StackConfig, validation_message
from gymgate.core.errors import ConfigError, printable
from gymgate.integrations.eval_options import DEFAULT_ENVIRONMENT, EvalOptions
from gymgate.integrations.stacks import starting_early
from gymgate.integrations.verifiers import PLUGIN_ID
from gymgate.integrations.verifiers.policy import Policy, check_policy, replaying
from gymgate.integrations.versions import require
from gymgate.runs.counted.account import notes_on
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.described.settings import is_example as is_example_source
from gymgate.runs.described.spec import RunSpec

if TYPE_CHECKING:
    from verifiers.v1.configs.cli.eval import EvalConfig
    from verifiers.v1.episode import Episode

EPILOG = """All other options go to verifiers unchanged: `vf-eval nemo-gym-env --help` lists them, and `@ FILE` reads
them from TOML or JSON. --data, --judge, --timeout and the like are short for `--env.taskset.*`."""
FLAGS = {
    "rows": "-n",
    "repeats": "-r",
    "concurrency": "-c",
    "output": "--output-dir",
    "api_key_var": "--client.api-key-var",
    "model": "--model",
}
"""Option -> flag of verifiers with the same value."""
SHOWN_OPTIONS = (
    *("--env", "--data", "-n", "-r", "-c"),
    *("-b", "-m", "--api-key-var", "--sampling"),
    *("--judge", "--judge-key-var", "--set", "--timeout"),
    *("-o", "-k", "--wide", "--push", "--resume"),
)
"""Options that `--help` lists."""
UNREAD = ("@", "--env.taskset", "--client", "--dry-run")
"""Beginnings of arguments that verifiers alone reads and that may change the stack or the policy."""


@click.group("eval")
def command() -> None:
    """Evaluate through verifiers' own eval, with its traces."""


@command.command(
    "run",
    cls=GroupedCommand,
    shown=SHOWN_OPTIONS,
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[TASKSET] [VERIFIERS OPTIONS]")
@env_option("environments", "NeMo Gym environment.", DEFAULT_ENVIRONMENT)
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
@failed_as_option
@option("Output", "--push", is_flag=True, help="Upload the results to the Prime Intellect platform.")
@option(
    "Output", "--resume", metavar="RUN_DIR", help="Run what a saved run still lacks; takes no other settings."
)
@click.pass_context
def run(
    context: click.Context,
    /,
    ks: Sequence[int] | None,
    wide: bool,
    resume: str | None,
    concurrency: int,
    failed_as: float | None,
    sampling: Mapping[str, Any],
    **_: Any,
) -> int:
    """Run NeMo Gym environments through verifiers' eval.

    It writes verifiers' traces and takes verifiers' options. TASKSET is nemo-gym-env unless you give another. `gymgate run` runs
    the same environments without verifiers; report, compare and export read its runs.

    Without an endpoint (-b) the recorded rollouts that NeMo Gym ships are replayed: no model, no key. Without --rows the
    default environment runs one row, every other environment all its rows.

    \b
      gymgate eval run
      gymgate eval run --env mcqa --env citation_if -b http://localhost:8000/v1 -n 50 -r 4
    """
    require("nemogym")
    line = resumed_line(context) if resume else read_line(context)
    policy = None
    with contextlib.ExitStack() as exits:
        if line.eval_options is not None:
            policy = check_policy(
                line.eval_options,
                log,
                url=line.url,
                model=context.params["model"],
                key_variable=context.params["api_key_var"],
            )
            line = with_judges(line, policy)
            exits.enter_context(_starting_early(line))
        log("loading verifiers")
        from gymgate.integrations.verifiers import evaluation

        exits.enter_context(_one_line())
        try:
            config = evaluation.parse_settings(line.argv, concurrency, dict(sampling))
        except ConfigError as error:
            raise ConfigError(f"{error}{_near_names(context)}") from None
        if config.resume and not resume:
            raise ConfigError("a saved run is resumed with --resume RUN_DIR")
        eval_options = evaluation.taskset_of(config)
        if eval_options is not None:
            # Only now it is known what a file of verifiers, or its own arguments, say of the policy.
            policy = policy or check_policy(eval_options, log, **evaluation.policy_of(config))
            if policy.replayed:
                policy = exits.enter_context(replaying(eval_options, policy))
        path = evaluation.complete(config, policy and policy[:3])
        started = time.time()
        if not (episodes := _evaluate(config, path)):
            return 0
        rows, tasks = evaluation.closing_rows(episodes, ks, started, failed_as)
        _print_end(
            rows,
            tasks,
            path,
            ours=eval_options is not None,
            replayed=policy is not None and policy.replayed,
            ks=ks,
            wide=wide,
            is_example=eval_options is not None and is_example_source([eval_options.data]),
        )
        return int(tasks.counts.failed > 0)


class Line(NamedTuple):
    """What a command line says."""

    argv: list[str]
    """verifiers' command line for it."""
    eval_options: EvalOptions | None = None
    """The settings of the taskset, if verifiers' own arguments and files cannot change them or the policy. Then the policy is
    checked, and the stack starts, before verifiers is imported, which takes seconds."""
    url: str | None = None


def resumed_line(context: click.Context) -> Line:
    """Return the line that resumes a saved run. Raises `ConfigError` for other options on it, and for no such run."""
    directory = context.params["resume"]
    options = {name for name in context.params if is_on_line(context, name)} - {"args", "resume", "push"}
    if others := [*sorted(options), *context.params["args"]]:
        raise ConfigError(f"--resume takes every setting from the saved run; leave out {', '.join(others)}")
    saved = Path(directory) / "configs" / "resolved" / "eval.json"
    if not saved.is_file():
        raise ConfigError(f"{directory!r} is not the directory of a saved run: {saved} does not exist")
    return Line(["@", str(saved), "--resume"])


def read_line(context: click.Context) -> Line:
    """Return what the line of a new eval says: its arguments, which are for verifiers, and our options.

    Raises `ConfigError` for options that do not fit the taskset or one another.
    """
    args, settings = context.params["args"], taskset_settings(context)
    url, *replicas = endpoint_list(context.params["urls"]) if context.params["urls"] else [None]
    if replicas:
        raise ConfigError("verifiers calls one endpoint, and -b has several; `gymgate run` takes replicas")
    taskset = args[0] if args and not args[0].startswith(("-", "@")) else None
    if taskset is not None:
        is_ours = taskset.replace("_", "-") == PLUGIN_ID
        if settings and not is_ours:
            raise ConfigError(
                f"{', '.join(settings)}: settings of {PLUGIN_ID}, which taskset {taskset!r} does not have"
            )
    else:
        is_ours = not any(arg.startswith(("@", "--env.taskset.id")) for arg in args)
    default_taskset = [PLUGIN_ID] if taskset is None and is_ours else []
    argv = [*default_taskset, *args, *_flags(context, settings, url)]
    if not is_ours or any(arg.startswith(UNREAD) for arg in args):
        return Line(argv)
    try:
        return Line(argv, EvalOptions(**settings), url)
    except ValidationError as error:
        raise ConfigError(validation_message(error)) from None


def _flags(context: click.Context, settings: Mapping[str, Any], url: str | None) -> Iterator[str]:
    """Yield our options as verifiers' flags. Those that are not on the line hold defaults, which must not override a file."""
    values = context.params
    flags = {flag: values[name] for name, flag in FLAGS.items() if is_on_line(context, name)}
    flags |= {f"--env.taskset.{name.replace('_', '-')}": value for name, value in settings.items()}
    if url:
        flags["--client.base-url"] = url
    for flag, value in flags.items():
        yield flag
        yield str(value) if value is None or isinstance(value, str) else json.dumps(value)
    if not values["push"] and "--push" not in values["args"]:
        yield "--no-push"


def taskset_settings(context: click.Context) -> dict[str, Any]:
    """Return the settings of the taskset that our options give: its fields are those of a run's description."""
    values, fields = context.params, option_fields(context)
    data = {name: value for name, value in fields[RunSpec].items() if name == "data"}
    settings = {**data, **fields[EnvironmentConfig], **fields[StackConfig], **fields[RolloutLimits]}
    if (runtime := settings.pop("runtime", None)) is not None:
        settings |= {"gym": runtime.version, **runtime.model_dump(include={"interpreter"}, exclude_none=True)}
    if values["environments"]:
        settings["env"] = ",".join(values["environments"])
    if not isinstance(config := settings.get("config", ""), str):
        settings["config"] = ",".join(config)
    if judges := parse_judges(values["judges"], values["judge_key_vars"]):
        settings["models"] = {
            name: judge if isinstance(judge, str) else judge.model_dump(exclude_unset=True)
            for name, judge in judges.items()
        }
    if values["settings"]:
        environments = values["environments"] or (DEFAULT_ENVIRONMENT,)
        overrides = parse_overrides(values["settings"], environments)
        if len(environments) > 1:
            raise ConfigError("--set takes one environment here; give one --env, or use `gymgate run`")
        settings["overrides"] = overrides[environments[0]]
    return settings


def with_judges(line: Line, policy: Policy) -> Line:
    """Return a line with the models that `check_policy` learnt from judges' endpoints; of two flags verifiers takes the last."""
    if line.eval_options is None or not policy.judges:
        return line
    models = {**line.eval_options.models, **policy.judges}
    options = line.eval_options.model_copy(update={"models": models})
    return line._replace(argv=[*line.argv, "--env.taskset.models", json.dumps(models)], eval_options=options)


def _starting_early(line: Line) -> AbstractContextManager[None]:
    """Start the stack that a line asks for, unless Ray's nodes run it."""
    stack = line.eval_options and line.eval_options.run_spec().stack
    return starting_early(stack, log) if stack and stack.ray is None else contextlib.nullcontext()


def _near_names(context: click.Context) -> str:
    """Return our options and our taskset that arguments for verifiers look like."""
    options = [name for option in context.command.params for name in option.opts if name.startswith("--")]
    names = [
        name
        for arg in context.params["args"]
        for name in get_close_matches(arg.partition("=")[0], [*options, PLUGIN_ID], n=1)
        if name != arg and "." not in arg
    ]
    return f"; near names of gymgate's own: {', '.join(names)}" if names else ""


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Raise `ConfigError` where verifiers exits with a message."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, str):
            raise ConfigError(error.code) from None
        raise


def _evaluate(config: EvalConfig, path: Path) -> list[Episode[Any, Any, Any]]:
    """Run an eval in its directory, away from a terminal without verifiers' own summary, which has a line for each rollout."""
    from gymgate.integrations.verifiers.evaluation import evaluate

    frame = None if sys.stdout.isatty() or config.rich is None else io.StringIO()
    try:
        with contextlib.redirect_stdout(frame) if frame else contextlib.nullcontext():
            return evaluate(config, path, log)
    except KeyboardInterrupt:
        log(f"results: {path}\n{_resume(path)}")
        raise
    except SystemExit:
        click.echo(printable(frame.getvalue()) if frame else "", nl=False)  # that there is nothing to resume
        raise


def _print_end(
    rows: Rows, tasks: CollectedTasks, path: Path, *, replayed: bool, ours: bool = True, **table: Any
) -> None:
    """Print the closing table and what to do next; `ours`: NeMo Gym graded; `table` are arguments of `print_results`."""
    echo()
    print_results(rows, replayed=replayed, **table)
    for note in (*notes_on(tasks), *(accepted_answers(rows) if ours else ())):
        log(note)
    echo(f"results: {path}")
    log(
        f"  look:   {path / 'traces.jsonl'} has one rollout per line, {path / 'logs/latest/eval.log'} is the log"
    )
    if tasks.counts.failed:
        log(_resume(path))
    log_next(
        "gymgate check ENV, for file and line of an exception" if tasks.broken_environments else "",
        "add -b URL -m MODEL for your model" if replayed else "",
        "--env.retries.max-retries 3 runs a failed rollout again" if tasks.counts.failed else "",
        "gymgate run ENV -o DIR keeps rollouts for gymgate report, compare and export",
    )


def _resume(path: Path) -> str:
    return f"  resume: gymgate eval run --resume {path}  (runs what failed or is missing)"
