"""Options that more than one command takes, declared once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal

import click

from gymgate.config import DEFAULT_MAX_CALLS, RolloutLimits, StackConfig
from gymgate.errors import ConfigError

Command = Callable[..., Any]


@dataclass(frozen=True)
class EndpointOptions:
    """What `endpoint_options` read, which a command gets as `endpoint`."""

    model: str | None
    dialect: Literal["chat", "responses"]
    api_key_var: str | None
    wait_for_policy: float | None


@dataclass(frozen=True)
class EnvironmentOptions:
    """What `environment_options` read, which a command gets as `served`."""

    judges: tuple[str, ...]
    settings: tuple[str, ...]
    env_vars: tuple[str, ...]
    config: str | None
    agent: str | None
    timeout: float
    agent_processes: int
    hang_timeout: float
    max_calls: int

    @property
    def limits(self) -> RolloutLimits:
        return RolloutLimits(timeout_s=self.timeout, max_calls=self.max_calls)


def checked_url(text: str) -> str:
    """An endpoint's address; `ConfigError` for what is none."""
    if not re.match(r"https?://[^/]", text):
        raise ConfigError(f"-b {text!r} is no URL; write http://host:8000/v1")
    return text


class Seconds(click.FloatRange):
    """Seconds on the command line: a finite number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def endpoint_options(command: Command) -> Command:
    """`-m`, `--dialect`, `--api-key-var`, `--wait-for-policy`: what is at the policy's endpoint, and when."""
    options = (
        click.option("-m", "--policy-model", "model", help="Model name. [the endpoint's only one]"),
        click.option(
            "--dialect",
            type=click.Choice(["chat", "responses"]),
            default="chat",
            show_default=True,
            help="What the endpoint speaks.",
        ),
        click.option(
            "--api-key-var", metavar="NAME", help="Variable with the endpoint's key. [OPENAI_API_KEY, if set]"
        ),
        click.option(
            "--wait-for-policy",
            type=Seconds(0),
            metavar="SECONDS",
            help="For the endpoint to answer, before anything is started.",
        ),
    )
    return _all(options, _gathered("endpoint", EndpointOptions, command))


def environment_options(command: Command) -> Command:
    """Judges, overrides, config and agent of the environments, and the bounds of a rollout."""
    options = (
        click.option(
            "--model",
            "judges",
            multiple=True,
            metavar="NAME=URL",
            help="Endpoint of a judge or simulator by instance name ('*': all others): NAME=URL, NAME=MODEL@URL, "
            "NAME=policy, or NAME=none to start without one (a rollout that calls it fails).",
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override in the environment's config, dotted, or @FILE: a YAML file of them; ENV:KEY=VALUE with "
            "several.",
        ),
        click.option(
            "--env-var",
            "env_vars",
            multiple=True,
            metavar="NAME",
            help="Variable that the environment may see.",
        ),
        click.option("--config", help="Which of the environment's configs."),
        click.option("--agent", metavar="NAME", help="Agent instance for rows without agent_ref."),
        click.option(
            "--timeout",
            type=Seconds(0, min_open=True),
            default=3600.0,
            show_default=True,
            help="Seconds per rollout.",
        ),
        click.option(
            "--agent-processes",
            type=click.IntRange(1),
            default=StackConfig.model_fields["agent_processes"].default,
            show_default=True,
            help="Concurrent rollouts for agents that cannot forward the rollout key; each runs in its own process.",
        ),
        click.option(
            "--hang-timeout",
            type=Seconds(0),
            default=StackConfig.model_fields["hang_timeout_s"].default,
            show_default=True,
            metavar="SECONDS",
            help="Restart servers that for so long neither answer nor compute; 0: never.",
        ),
        click.option(
            "--max-calls",
            type=click.IntRange(1),
            default=DEFAULT_MAX_CALLS,
            show_default=True,
            help="Policy calls per rollout; further ones are refused.",
        ),
    )
    return _all(options, _gathered("served", EnvironmentOptions, command))


def _gathered(name: str, cls: type[Any], command: Command) -> Command:
    """The command, which gets the fields of `cls` as one argument."""

    @wraps(command)
    def gathered(**given: Any) -> Any:
        found = cls(**{each.name: given.pop(each.name) for each in fields(cls)})
        return command(**{name: found}, **given)

    return gathered


def _all(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    """In the order in which `--help` shows them."""
    for option in reversed(options):
        command = option(command)
    return command
