"""Options that several commands take. Each is declared here once, so that it means the same everywhere."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from gymgate.cli.output import echo, log
from gymgate.cli.texts import doubtful_fields, header_fields, parse_prices, parse_runtime, sampling_fields
from gymgate.core.config import (
    DEFAULT_KEY_VARIABLE,
    DEFAULT_NEMO_GYM,
    Config,
    EnvironmentConfig,
    HTTPEndpoint,
    RolloutLimits,
    StackConfig,
)
from gymgate.results.trackers import LIBRARIES
from gymgate.runs.counted.metrics import parse_ks
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.plan import parse_shard
from gymgate.runs.described.spec import RunSpec
from gymgate.runs.stored.layout import FAILURES, ROLLOUTS, ROWS, RUN

Command = Callable[..., Any]

GROUPS = ("Rows", "Policy", "Judges", "Environment", "Limits", "Measurements", "Thresholds", "Output")
"""Groups of options in the order of `--help`."""
ALL_OPTIONS = "gymgate.all_options"
"""Key of a context whose help lists all options."""
OTHER = "Other"
"""Group of the options that have none, at the end."""
KINDS = {
    "resources_servers": "resources",
    "environments": "environment",
    "benchmarks": "benchmark",
    "responses_api_agents": "agent",
}
"""Directory of a nemo-gym release -> value of `--kind`."""


class Option(click.Option):
    """An option with the group in which `--help` lists it, and the config's field that it sets, if it sets one."""

    def __init__(
        self,
        *args: Any,
        group: str = "Other",
        field: tuple[type[Config], str] | None = None,
        once: str = "",
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.group = group
        self.field = field
        self.once = once
        """What to do instead of giving it twice, where the last of several would drop the others without a word."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Keep each value of an option that may be given once."""
        if self.once:
            parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append")
        else:
            super().add_to_parser(parser, ctx)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:
        """Return the value. Raises `click.UsageError` for several of an option that may be given once."""
        values = opts.get(self.name or "") if self.once else None
        if not isinstance(values, list):
            return super().consume_value(ctx, opts)
        if len(values) > 1:
            raise click.UsageError(f"{self.opts[-1]} is given {len(values)} times; {self.once}", ctx)
        return super().consume_value(ctx, {**opts, self.name or "": values[0]})


def option(group: str, *names: str, **attributes: Any) -> Callable[[Command], Command]:
    """Return `click.option` for an option of a group."""
    return click.option(*names, cls=Option, group=group, **attributes)


def field_option(
    group: str, cls: type[Config], name: str, *names: str, **attributes: Any
) -> Callable[[Command], Command]:
    """Return an option that sets a config's field; its name, type, bounds, default and help are the field's."""
    field = cls.model_fields[name]
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    optional = len(kinds) < len(get_args(field.annotation))
    kind = kinds[0] if optional else field.annotation
    low = next((bound for bound in field.metadata if isinstance(bound, Ge | Gt)), None)
    high = next((bound for bound in field.metadata if isinstance(bound, Le)), None)
    bounds: dict[str, Any] = {} if low is None else {"min": low.ge if isinstance(low, Ge) else low.gt}
    if high is not None:
        bounds["max"] = high.le
    text = " ".join((field.description or "").replace("`", "").split())
    settings: dict[str, Any] = {}
    if get_origin(kind) is Literal:
        settings["type"] = click.Choice(get_args(kind))
    elif kind is bool:
        settings["is_flag"] = True
    elif kind is int:
        settings |= {"type": click.IntRange(**bounds), "metavar": "N"}
    elif kind is float:
        number = FiniteRange(**bounds, min_open=isinstance(low, Gt)) if low else Finite()
        settings |= {"type": number, "metavar": "SECONDS"}
    if any(get_origin(kind) is tuple for kind in (field.annotation, *kinds)):
        settings["multiple"] = True
        text += " Repeatable." * attributes.get("multiple", True)
    elif field.default is not None and not field.is_required() and kind is not bool:
        settings |= {"default": field.default, "show_default": True}
        if optional:
            settings["type"] = OrNone(settings.get("type", click.STRING))
            text = text.replace("None", "none")
    text = text.replace(". None:", ". Default:").replace("None:", "default:")
    names = names or ("--" + name.replace("_", "-"),)
    return option(group, *names, field=(cls, name), **{"help": text, **settings, **attributes})


def parsed(parse: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a callback that parses what an option's value is, if it has one."""
    return lambda _context, _option, value: parse(value) if value else value


def option_fields(context: click.Context) -> dict[type[Config], dict[str, Any]]:
    """Return the values of `field_option`s on the command line, by config and field."""
    values: dict[type[Config], dict[str, Any]] = defaultdict(dict)
    for parameter in context.command.params:
        if isinstance(parameter, Option) and parameter.field and is_on_line(context, parameter.name):
            cls, name = parameter.field
            values[cls][name] = context.params[parameter.name or ""]
    return values


def is_on_line(context: click.Context, name: str | None) -> bool:
    """Return whether a parameter is on the command line."""
    return context.get_parameter_source(name or "") is not ParameterSource.DEFAULT


class OrNone(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A value of another type, or `none`."""

    def __init__(self, other: click.ParamType) -> None:  # type: ignore[type-arg]
        self.other = other
        self.name = other.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value == "none" else self.other.convert(value, param, ctx)


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options by group: those named in `shown`, if it has some; `--help-all` lists all."""

    def __init__(self, *args: Any, shown: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.shown = frozenset(shown)
        if shown:
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_print_all_options,
                    help="Show every option and exit.",
                )
            )

    def more_options(self) -> list[click.Option]:
        """Return the options that only `--help-all` lists."""
        options = (
            [parameter for parameter in self.params if isinstance(parameter, click.Option)]
            if self.shown
            else []
        )
        return [
            parameter
            for parameter in options
            if self.shown.isdisjoint(parameter.opts) and "--help-all" not in parameter.opts
        ]

    def where_explained(self, message: str, path: str) -> str:
        """Return where the options that a message names are explained, if `--help` leaves one of them out."""
        options = [option for hidden in self.more_options() for option in hidden.opts]
        is_named = any(re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", message) for option in options)
        return f" ({path} --help-all explains all options)" if is_named else ""

    def groups(self, context: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return each group's options with their help texts."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        left_out = [] if context.meta.get(ALL_OPTIONS) else self.more_options()
        for parameter in self.get_params(context):
            if not isinstance(parameter, click.Option) or parameter in left_out:
                continue
            if record := parameter.get_help_record(context):
                groups.setdefault(getattr(parameter, "group", OTHER), []).append(record)
        return {name: records for name, records in groups.items() if records}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for name, records in self.groups(ctx).items():
            with formatter.section(name):
                formatter.write_dl(records)
        if (more := self.more_options()) and not ctx.meta.get(ALL_OPTIONS):
            formatter.write(f"\n{len(more)} more options: {ctx.command_path} --help-all\n")


def _print_all_options(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[ALL_OPTIONS] = True
        echo(context.get_help())
        context.exit()


def complete_environments(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a packaged environment, else the path of a file."""
    from gymgate.gym.by_name import list_environments

    names = dict.fromkeys(entry.name for entry in list_environments() if entry.name.startswith(incomplete))
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def env_option(name: str, help: str, default: str) -> Callable[[Command], Command]:
    """Return the option that names environments."""
    return option(
        "Rows",
        "--env",
        name,
        multiple=True,
        metavar="ENV",
        shell_complete=complete_environments,
        help=f"{help} Repeatable. [{default}]",
    )


class Finite(click.types.FloatParamType):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class FiniteRange(click.FloatRange, Finite):
    """A finite number within a range."""


class _Output(click.Path):
    """Where a command writes: nothing that a run's directory is made of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        if path.name in (RUN, ROWS, ROLLOUTS, FAILURES) and (path.parent / RUN).exists():
            self.fail(f"{path} is a file of the run in {path.parent}; write elsewhere.", param, ctx)
        return super().convert(value, param, ctx)


FILE = click.Path(path_type=Path, dir_okay=False)
OUTPUT_FILE = _Output(path_type=Path, dir_okay=False)
OUTPUT = _Output(path_type=Path)
DIRECTORY = click.Path(path_type=Path, file_okay=False)


def number_option(
    *names: str, help: str, least: int = 1, default: int | None = None, group: str = OTHER
) -> Callable[[Command], Command]:
    """Return an option for a whole number."""
    return option(
        group, *names, type=click.IntRange(least), metavar="N", help=help, default=default, show_default=True
    )


def seconds_option(*names: str, help: str, default: float) -> Callable[[Command], Command]:
    """Return an option for a time greater than 0."""
    return option(
        OTHER,
        *names,
        type=FiniteRange(0, min_open=True),
        metavar="SECONDS",
        help=help,
        default=default,
        show_default=True,
    )


price_option = field_option(
    "Output",
    RunSpec,
    "prices",
    "--price",
    "prices",
    callback=parsed(parse_prices),
    metavar="[NAME=]IN,OUT",
    help="Show tokens and cost: dollars per million input and output tokens of the policy, or of judge NAME ('*': all others). "
    "Repeatable.",
)
gym_option = field_option(
    "Environment",
    StackConfig,
    "runtime",
    "--gym",
    "gym",
    callback=parsed(parse_runtime),
    default=DEFAULT_NEMO_GYM,
    metavar="VERSION[@PYTHON]",
    help="nemo-gym release, or the interpreter of one that you installed yourself.",
)
"""`--gym`; the command gets a `RuntimeConfig` as `gym`."""
host_option = click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on."
)


def port_option(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option for the port that a command listens on."""
    return click.option(
        "--port",
        default=default,
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Port to listen on; 0: a free one.",
        show_default=True,
    )


json_option = option("Output", "--json", "as_json", is_flag=True, help="Print the result as JSON.")
kind_option = option(
    "Environment",
    "--kind",
    type=click.Choice([*KINDS.values()]),
    help="Only environments of this kind, by the release's directory.",
)
data_option = field_option(
    "Rows", RunSpec, "data", "--data", metavar="ROWS", once="gymgate data blend makes one file of several"
)
rows_option = field_option("Rows", RunSpec, "rows", "-n", "--rows")
repeats_option = field_option("Rows", RunSpec, "repeats", "-r", "--repeats")
concurrency_option = field_option("Limits", Pace, "concurrency", "-c", "--concurrency")
base_url_option = option(
    "Policy",
    "-b",
    "--base-url",
    "urls",
    metavar="URL[,URL...]",
    once="separate replicas with commas",
    help="Base URL of the policy, including /v1. Separate replicas with commas; slurm:PORT is every node of this Slurm job. "
    "[recorded rollouts are replayed]",
)
model_option = field_option(
    "Policy",
    HTTPEndpoint,
    "model",
    "-m",
    "--model",
    metavar="NAME",
    help="Model name of the policy. [the only one its endpoint serves]",
)
api_key_var_option = field_option(
    "Policy",
    HTTPEndpoint,
    "api_key_env",
    "--api-key-var",
    "api_key_var",
    metavar="NAME",
    help=f"Environment variable with the endpoint's key. [{DEFAULT_KEY_VARIABLE}, if set]",
)


def _sampling(context: click.Context, _: click.Parameter, texts: Sequence[str]) -> Any:
    """Parse the fields; warn of those that look mistyped, which are sent all the same: an endpoint may know them."""
    if not texts or context.resilient_parsing:
        return texts
    fields = sampling_fields(texts)
    for name, near_name in doubtful_fields(fields).items():
        log(
            f"warning: --sampling {name}: not a field that gymgate knows; near name: {near_name}. It is sent all the same"
        )
    return fields


sampling_option = field_option(
    "Policy",
    HTTPEndpoint,
    "sampling",
    "--sampling",
    callback=_sampling,
    metavar="KEY=VALUE",
    help="Field of every policy call, e.g. temperature=0.7. Repeatable.",
)
replay_file_option = option(
    "Policy",
    "--replay-file",
    "files",
    multiple=True,
    metavar="FILE|RUN",
    help="JSONL file of recorded rollouts to replay, of NeMo Gym or gymgate, or a directory of gymgate run. Repeatable. "
    "[those that come with ENV]",
)
judge_option = option(
    "Judges",
    "--judge",
    "judges",
    multiple=True,
    metavar="NAME=URL",
    help="Endpoint of a judge or user simulator by instance name ('*': all others): NAME=URL, NAME=MODEL@URL, "
    "NAME=policy, or NAME=none to start without one (a rollout that calls it fails). Repeatable.",
)
judge_key_var_option = option(
    "Judges",
    "--judge-key-var",
    "judge_key_vars",
    multiple=True,
    metavar="NAME=VAR",
    help="Environment variable with the key of judge NAME's endpoint ('*': all others). Repeatable. [OPENAI_API_KEY, if set]",
)
set_option = option(
    "Environment",
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a setting of the environment's config by its dotted key; @FILE reads overrides from YAML; "
    "ENV:KEY=VALUE with several environments. A key with a name that stands in no code or config is refused; +KEY=VALUE sets it "
    "all the same. Repeatable.",
)
env_var_option = field_option("Environment", StackConfig, "env_vars", "--env-var", "env_vars", metavar="NAME")
config_option = field_option(
    "Environment",
    EnvironmentConfig,
    "config",
    "--config",
    metavar="NAME",
    callback=parsed(lambda names: names[0] if len(names) == 1 else names),
)
sandbox_option = field_option("Environment", EnvironmentConfig, "sandbox", "--sandbox", metavar="NAME|YAML")
agent_option = field_option("Environment", EnvironmentConfig, "agent", "--agent", metavar="NAME")
routing_option = field_option("Environment", EnvironmentConfig, "routing", "--routing")


ENVIRONMENT_OPTIONS = (
    judge_option,
    judge_key_var_option,
    set_option,
    config_option,
    sandbox_option,
    env_var_option,
    agent_option,
    routing_option,
    field_option("Environment", StackConfig, "gateway_host", "--gateway-host", metavar="ADDRESS"),
    field_option("Limits", RolloutLimits, "timeout_s", "--timeout", help="Seconds per rollout."),
    field_option("Limits", RolloutLimits, "max_calls", "--max-calls"),
    field_option("Limits", StackConfig, "agent_processes", "--agent-processes"),
    field_option("Limits", StackConfig, "hang_timeout_s", "--hang-timeout"),
    field_option("Limits", StackConfig, "stock_servers"),
    field_option(
        "Limits",
        StackConfig,
        "linger_s",
        "--linger",
        help="Keep the servers for so many seconds after the command, and use those that an earlier command with --linger kept, "
        "if they have the same settings. `gymgate ps` shows them.",
    ),
)


k_option = option(
    "Output",
    "-k",
    "--ks",
    "ks",
    callback=parsed(parse_ks),
    metavar="K,...",
    help="k of pass@k and maj@k, over the tasks with enough scored rollouts. [the table: 1 and the largest]",
)
wide_option = option(
    "Output",
    "--wide",
    is_flag=True,
    help="Print every metric, in several tables where the terminal is too narrow.",
)


keep_option = click.option(
    "--keep",
    "bounds",
    metavar="LOW..HIGH",
    help="Write only rows with a mean reward in this range.",
)


dataset_option = option(
    "Rows",
    "--dataset",
    "datasets",
    multiple=True,
    metavar="DATASET",
    help="Dataset that RUN had its rows from (hf:NAME), to be loaded for them; files are read without it. Repeatable.",
)
overlap_option = click.option(
    "--overlap",
    type=click.Choice(["refuse", "first"]),
    default="refuse",
    show_default=True,
    help="What to do with a rollout that is in two runs.",
)


failed_as_option = option(
    "Output",
    "--failed-as",
    type=click.Choice(["0"]),
    callback=lambda context, option, value: None if value is None else float(value),
    help="Count rollouts that failed with this reward. [they are left out]",
)

tasks_option = number_option("--tasks", default=50, help="Tasks to show with their conversations.", least=0)
per_task_option = number_option(
    "--per-task", default=4, help="Conversations of each task, shown side by side."
)


def _installed(_: click.Context, __: click.Parameter, library: str | None) -> str | None:
    from gymgate.results.tracking import require_tracker

    return None if library is None else require_tracker(library)


log_to_option = option(
    "Output",
    "--log-to",
    type=click.Choice([*LIBRARIES]),
    callback=_installed,
    help="Log settings and metrics with this package, which must be installed.",
)


shard_option = option(
    "Rows",
    "--shard",
    callback=parsed(parse_shard),
    metavar="I/N",
    help="Run only shard I of N, in DIR/shard-I-of-N.",
)


ENDPOINT_OPTIONS = (
    base_url_option,
    model_option,
    sampling_option,
    api_key_var_option,
    field_option("Policy", RunSpec, "wait_for_policy_s", "--wait-for-policy"),
    field_option("Policy", HTTPEndpoint, "dialect"),
    field_option("Policy", HTTPEndpoint, "system_messages"),
    field_option(
        "Policy",
        HTTPEndpoint,
        "headers",
        "--header",
        "headers",
        callback=parsed(header_fields),
        metavar="NAME=VALUE",
        help="Header of every policy call. Repeatable.",
    ),
    field_option("Policy", HTTPEndpoint, "session_header", metavar="NAME"),
    field_option("Policy", HTTPEndpoint, "finish_sessions"),
    field_option("Policy", HTTPEndpoint, "max_retries"),
    field_option("Policy", HTTPEndpoint, "timeout_s", "--call-timeout"),
)


def add_options(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    """Return a decorator that adds options, in the order in which `--help` shows them."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
