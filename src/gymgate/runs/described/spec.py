"""`RunSpec`: the description of a run, as `gymgate run --dry-run` prints it and `--spec` reads it.

The options that set its fields are in `cli.run` and `cli.options`; `field_option` makes most of them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gymgate.core.config import (
    PAIRS,
    SORTED,
    Config,
    HTTPEndpoint,
    ReplayEndpoint,
    RolloutLimits,
    StackConfig,
)
from gymgate.core.errors import ConfigError
from gymgate.core.files import read_whole
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.prices import Price, refuse_price_of_replay

SECRET = {"api_key", "headers"}
"""Fields of an endpoint that are shown nowhere."""


def _policy(value: Any) -> Any:
    return {"type": "http", **value} if isinstance(value, Mapping) else value


class RolloutSpec(Config):
    """Environments that run and score rollouts, and bounds on each."""

    stack: StackConfig
    """Environments, their servers, and the endpoints of judges. Its fields may also stand next to it: `environments` is short for
    `stack.environments`."""
    limits: RolloutLimits = RolloutLimits()
    """Bounds on each rollout. Those that are not set keep this default."""

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names of all settings, with those of `stack`'s fields."""
        return frozenset({*cls.model_fields, *StackConfig.model_fields})

    @classmethod
    def stack_defaults(cls) -> Mapping[str, Any]:
        """Return settings of the stack that differ from `StackConfig`'s defaults."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        gathered = gather_stack(value)
        if isinstance(gathered, Mapping) and isinstance(gathered["stack"], Mapping):
            return {**gathered, "stack": {**cls.stack_defaults(), **gathered["stack"]}}
        return gathered

    @field_validator("limits", mode="before")
    @classmethod
    def _keep_defaults(cls, value: Any) -> Any:
        limits = value.model_dump(exclude_unset=True) if isinstance(value, RolloutLimits) else value
        default: RolloutLimits = cls.model_fields["limits"].default
        return {**default.model_dump(), **limits} if isinstance(limits, Mapping) else limits


class RowSettings(Config):
    """The rows of a run."""

    data: str = "example"
    """Packaged file of rows by name, JSONL path, or `hf:owner/name[:split]`."""
    rows: int | None = Field(default=None, ge=1)
    """Maximum rows per environment or file; `None`: all."""


class RunSpec(RowSettings, RolloutSpec):
    """One run: rows, a policy, the environments that run and score them, and limits."""

    repeats: int = Field(default=1, ge=1)
    """Rollouts per row."""
    seeds: tuple[int, ...] | None = None
    """Seeds sent to the policy: a rollout of each row for each seed and repeat. `None`: none is sent."""
    policy: Annotated[
        Annotated[HTTPEndpoint | ReplayEndpoint, Field(discriminator="type")] | None, BeforeValidator(_policy)
    ] = None
    """Where the policy's calls go; `None`: the environments' recorded rollouts are replayed."""
    wait_for_policy_s: float | None = Field(default=None, ge=0)
    """Wait up to this many seconds for an endpoint that does not answer; `None`: not at all."""
    pace: Pace = Pace()
    """Concurrency, retries, and when the run warns or stops."""
    record_bodies: bool = False
    """Keep each model call's request and response in the run's directory."""
    prices: Annotated[tuple[tuple[str, Price], ...], PAIRS, SORTED] = ()
    """Dollars per million input and output tokens by model server, e.g. `{policy_model: [0.15, 0.60]}`; `*` is for judges
    without a price."""

    @model_validator(mode="after")
    def _refuse_price_of_replay(self) -> Self:
        refuse_price_of_replay(dict(self.prices), replayed=not isinstance(self.policy, HTTPEndpoint))
        return self

    def document(self) -> dict[str, Any]:
        """Return the spec as JSON values, without keys and headers; `RunSpec.model_validate` reads it."""
        value = self.model_dump(mode="json")
        stack, policy = value["stack"], value["policy"]
        for environment in stack["environments"]:
            environment["overrides"] = dict(environment["overrides"])
        stack["models"] = dict(stack["models"])
        value["prices"] = dict(value["prices"])
        for endpoint in filter(None, (policy, *stack["models"].values())):
            if isinstance(endpoint, dict):
                for name in SECRET & endpoint.keys():
                    del endpoint[name]
                if "sampling" in endpoint:
                    endpoint["sampling"] = dict(endpoint["sampling"])
        return value


def gather_stack(value: Any) -> Any:
    """Return settings with the fields of `stack` that stand beside it moved into it; other values as they are.

    Raises `ValueError` for a field that is given in both places.
    """
    if not isinstance(value, Mapping):
        return value
    beside = {name: value[name] for name in value if name in StackConfig.model_fields}
    stack = value.get("stack") or {}
    if not isinstance(stack, Mapping | StackConfig):
        raise ValueError(f"stack must be a table of settings, not {stack!r}")
    if beside and isinstance(stack, StackConfig):
        raise ValueError(f"stack is a whole config, so {', '.join(beside)} must be set in it")
    if isinstance(stack, Mapping):
        if twice := [name for name in beside if name in stack]:
            raise ValueError(f"{twice[0]} is given twice: in stack and next to it")
        stack = {**beside, **stack}
        if isinstance(stack.get("environments"), str):
            stack["environments"] = (stack["environments"],)
    return {**{name: item for name, item in value.items() if name not in beside}, "stack": stack}


def read_spec(path: Path) -> dict[str, Any]:
    """Return the content of a TOML or JSON file that describes a run. Raises `ConfigError`, also for another content."""
    try:
        with path.open("rb") as file:
            text = read_whole(file).decode()
        value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read --spec {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        form = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"--spec {path} is not {form}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--spec {path} has no settings: it must hold an object")
    try:
        return dict(gather_stack(value))
    except ValueError as error:
        raise ConfigError(f"--spec {path}: {error}") from None
