"""Options that several commands take. Each is declared here once, so that it means the same everywhere."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, get_args

import click
import yaml
from click.shell_completion import CompletionItem
from packaging.version import InvalidVersion, Version

from gymgate.config import (
    DEFAULT_MAX_CALLS,
    DEFAULT_NEMO_GYM,
    HTTPEndpoint,
    RolloutLimits,
    Routing,
    RuntimeConfig,
    StackConfig,
)
from gymgate.errors import OptionError

Command = Callable[..., Any]

DEFAULT_CONCURRENCY = 64
DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
MAX_RETRIES: int = HTTPEndpoint.model_fields["max_retries"].default
GROUPS = ("Rows", "Policy", "Judges", "Environment", "Limits", "Output")
"""Groups of options in the order of `--help`."""
KINDS = {
    "resources_servers": "resources",
    "environments": "environment",
    "benchmarks": "benchmark",
    "responses_api_agents": "agent",
}
"""Directory of a nemo-gym release -> value of `--kind`."""


class Option(click.Option):
    """An option with the group in which `--help` lists it."""

    def __init__(self, *args: Any, group: str = "Other", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


def option(group: str, *names: str, **attributes: Any) -> Callable[[Command], Command]:
    """Return `click.option` for an option of a group."""
    return click.option(*names, cls=Option, group=group, **attributes)


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options by group."""

    def groups(self, context: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return each group's options with their help texts."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for parameter in self.get_params(context):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)):
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        return {name: records for name, records in groups.items() if records}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for name, records in self.groups(ctx).items():
            with formatter.section(name):
                formatter.write_dl(records)


def complete_environments(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a packaged environment, else the path of a file."""
    from gymgate.api import list_environments

    names = dict.fromkeys(each.name for each in list_environments() if each.name.startswith(incomplete))
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


class Finite(click.types.FloatParamType):
    """A finite number on the command line."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Seconds(click.FloatRange, Finite):
    """Seconds on the command line: a finite number within a range."""

    name = "seconds"


class Gym(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A nemo-gym release on the command line, as `RuntimeConfig`: `0.7.0`, `/path/to/python` or `0.7.0@/path/to/python`."""

    name = "gym"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RuntimeConfig:
        if isinstance(value, RuntimeConfig):
            return value
        version, _, path = value.rpartition("@") if os.sep in value else (value, "", None)
        version = version or DEFAULT_NEMO_GYM
        try:
            Version(version)
        except InvalidVersion:
            self.fail(f"{version!r} is not a version; write one such as {DEFAULT_NEMO_GYM}.", param, ctx)
        return RuntimeConfig(version=version, interpreter=path)


gym_option = option(
    "Environment",
    "--gym",
    type=Gym(),
    default=DEFAULT_NEMO_GYM,
    show_default=True,
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
kind_option = click.option(
    "--kind",
    type=click.Choice([*KINDS.values()]),
    help="Only environments of this kind, by the release's directory.",
)
data_option = option(
    "Rows",
    "--data",
    metavar="ROWS",
    help="Packaged file by name, JSONL path, or hf:owner/name[:split]. [example]",
)
rows_option = option(
    "Rows",
    "-n",
    "--rows",
    type=click.IntRange(1),
    metavar="N",
    help="Maximum rows per environment or file. [all]",
)
repeats_option = option(
    "Rows",
    "-r",
    "--repeats",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Rollouts per row.",
)
concurrency_option = option(
    "Limits",
    "-c",
    "--concurrency",
    type=click.IntRange(1),
    default=DEFAULT_CONCURRENCY,
    show_default=True,
    metavar="N",
    help="Concurrent rollouts.",
)
base_url_option = option(
    "Policy",
    "-b",
    "--base-url",
    "urls",
    metavar="URL[,URL...]",
    help="Base URL of the policy, including /v1. Separate replicas with commas; slurm:PORT is every node of this Slurm job. "
    "[recorded rollouts are replayed]",
)
model_option = option(
    "Policy",
    "-m",
    "--model",
    metavar="NAME",
    help="Model name of the policy. [the only one its endpoint serves]",
)
api_key_var_option = option(
    "Policy",
    "--api-key-var",
    metavar="NAME",
    help="Environment variable with the endpoint's key. [OPENAI_API_KEY, if set]",
)
sampling_option = option(
    "Policy",
    "--sampling",
    multiple=True,
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
    "ENV:KEY=VALUE with several environments. Repeatable.",
)
env_var_option = option(
    "Environment",
    "--env-var",
    "env_vars",
    multiple=True,
    metavar="NAME",
    help="Environment variable to pass through to the environment. Repeatable.",
)
config_option = option(
    "Environment",
    "--config",
    multiple=True,
    metavar="NAME",
    help="Config of the environment, by name or as a YAML file. Repeatable: combined in order. [its default one]",
)
sandbox_option = option(
    "Environment",
    "--sandbox",
    metavar="NAME|YAML",
    help="Where environments run commands in a sandbox: docker, local, ... or a YAML file with a provider's "
    "settings; `gymgate doctor` says which can be used here. [the config's own]",
)
agent_option = option(
    "Environment",
    "--agent",
    metavar="NAME",
    help="Agent instance for rows without agent_ref. [the config's only or first one]",
)
routing_option = option(
    "Environment",
    "--routing",
    type=click.Choice(get_args(Routing)),
    help="How a rollout's key reaches the model calls of an agent of your own; `process` for one that drops the key. "
    "[url; NeMo Gym's agents: a table]",
)


ENVIRONMENT_OPTIONS = (
    judge_option,
    judge_key_var_option,
    set_option,
    config_option,
    sandbox_option,
    env_var_option,
    agent_option,
    routing_option,
    option(
        "Environment",
        "--gateway-host",
        metavar="ADDRESS",
        help="Address of this machine at which agents in sandboxes with a network of their own reach the policy, such as that "
        "of Docker's bridge (172.17.0.1). [loopback only]",
    ),
    option(
        "Limits",
        "--timeout",
        type=Seconds(0, min_open=True),
        default=3600.0,
        show_default=True,
        metavar="SECONDS",
        help="Seconds per rollout.",
    ),
    option(
        "Limits",
        "--max-calls",
        type=click.IntRange(1),
        default=DEFAULT_MAX_CALLS,
        show_default=True,
        metavar="N",
        help="Policy calls per rollout; further calls are refused and the rollout counts as truncated.",
    ),
    option(
        "Limits",
        "--agent-processes",
        type=click.IntRange(1),
        default=StackConfig.model_fields["agent_processes"].default,
        show_default=True,
        metavar="N",
        help="Concurrent rollouts for agents that cannot forward the rollout key; each runs in its own process.",
    ),
    option(
        "Limits",
        "--hang-timeout",
        type=Seconds(0),
        default=StackConfig.model_fields["hang_timeout_s"].default,
        show_default=True,
        metavar="SECONDS",
        help="Restart a server that has been unresponsive and idle for SECONDS while rollouts wait; 0: never.",
    ),
)


k_option = option(
    "Output",
    "-k",
    "--ks",
    "ks",
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
    help="Write only rows whose mean reward lies in this range.",
)


overlap_option = click.option(
    "--overlap",
    type=click.Choice(["refuse", "first"]),
    default="refuse",
    show_default=True,
    help="What to do with a rollout that is in two runs.",
)


@dataclass(frozen=True)
class EndpointOptions:
    """Values of `endpoint_options`, which a command gets as `endpoint`."""

    urls: str | None
    """As given: comma-separated, unchecked; `None`: recorded rollouts are replayed."""
    model: str | None
    dialect: Literal["chat", "responses"]
    api_key_var: str | None
    headers: tuple[str, ...]
    sampling: tuple[str, ...]
    max_retries: int
    call_timeout: float
    wait_for_policy: float | None


@dataclass(frozen=True)
class EnvironmentOptions:
    """Values of `environment_options`, which a command gets as `served`."""

    judges: tuple[str, ...]
    judge_key_vars: tuple[str, ...]
    settings: tuple[str, ...]
    env_vars: tuple[str, ...]
    config: tuple[str, ...]
    agent: str | None
    sandbox: str | None
    routing: Routing | None
    gateway_host: str | None
    timeout: float
    agent_processes: int
    hang_timeout: float
    max_calls: int

    @property
    def limits(self) -> RolloutLimits:
        return RolloutLimits(timeout_s=self.timeout, max_calls=self.max_calls)


def endpoint_options(command: Command) -> Command:
    """Add the options of the policy's endpoint; the command gets `endpoint: EndpointOptions`."""
    options = (
        base_url_option,
        model_option,
        sampling_option,
        api_key_var_option,
        option(
            "Policy",
            "--dialect",
            type=click.Choice(["chat", "responses"]),
            default="chat",
            show_default=True,
            help="API that the endpoint speaks.",
        ),
        option(
            "Policy",
            "--header",
            "headers",
            multiple=True,
            metavar="NAME=VALUE",
            help="Header of every policy call. Repeatable.",
        ),
        option(
            "Policy",
            "--max-retries",
            type=click.IntRange(0),
            default=MAX_RETRIES,
            show_default=True,
            metavar="N",
            help="Retries of a policy call that failed for a reason that may pass. A 429 is retried until the rollout's "
            "deadline and does not count, except with 0: no call is sent again.",
        ),
        option(
            "Policy",
            "--call-timeout",
            type=Seconds(0, min_open=True),
            default=3600.0,
            show_default=True,
            metavar="SECONDS",
            help="Seconds per policy call.",
        ),
        option(
            "Policy",
            "--wait-for-policy",
            type=Seconds(0),
            metavar="SECONDS",
            help="Wait up to SECONDS for an endpoint that does not answer. [not at all]",
        ),
    )
    return add_options(options)(_gathered("endpoint", EndpointOptions, command))


def environment_options(command: Command) -> Command:
    """Add the options of the environments and of each rollout; the command gets `served: EnvironmentOptions`."""
    return add_options(ENVIRONMENT_OPTIONS)(_gathered("served", EnvironmentOptions, command))


def key_variable(name: str | None) -> str | None:
    """Return the variable that holds a key: the named one, else the default one if it is set."""
    return name or (DEFAULT_KEY_VARIABLE if os.environ.get(DEFAULT_KEY_VARIABLE) else None)


def checked_url(text: str) -> str:
    """Return an endpoint's address; raises `OptionError` if it is not an http(s) URL."""
    if not re.match(r"https?://[^/]", text):
        raise OptionError(f"-b {text!r} is not a URL; write http://host:8000/v1")
    return text


def yaml_value(option: str, text: str, value: str) -> Any:
    """Return the value of `OPTION KEY=VALUE`, which is YAML. Raises `OptionError`."""
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise OptionError(
            f"{option} {text!r}: the value is not YAML: {' '.join(str(error).split())}"
        ) from None


def key_value(option: str, text: str, example: str = "") -> tuple[str, Any]:
    """Return the key and the value of `OPTION KEY=VALUE`. Raises `OptionError`; `example` goes to its message."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise OptionError(f"{option} {text!r}: write KEY=VALUE{example}")
    return key, yaml_value(option, text, value)


def _gathered(name: str, cls: type[Any], command: Command) -> Command:
    """Return the command with the options that are fields of `cls` passed as one argument."""

    @wraps(command)
    def gathered(**given: Any) -> Any:
        found = cls(**{each.name: given.pop(each.name) for each in fields(cls)})
        return command(**{name: found}, **given)

    return gathered


def add_options(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    """Return a decorator that adds options, in the order in which `--help` shows them."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
