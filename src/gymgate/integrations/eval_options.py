"""The settings of an eval, as the SDKs' command lines give them, and the run that they describe."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gymgate.core.config import (
    DEFAULT_NEMO_GYM,
    Config,
    EnvironmentConfig,
    EnvironmentSettings,
    RolloutLimits,
    RuntimeConfig,
    RuntimeSettings,
    StackConfig,
    StackSettings,
    dotted,
    validation_message,
)
from gymgate.runs.described.spec import RowSettings, RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymgate.gym.catalog import Environment

DEFAULT_ENVIRONMENT = "example_session_state_mgmt"
DEFAULT_DATA: str = RowSettings.model_fields["data"].default


def literal(value: Any) -> Any:
    """Return the value of a string that is JSON; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _parsed(value: Any) -> Any:
    """The value of a list or mapping, which a command line gives as JSON, or as names with commas between them."""
    if not isinstance(value, str):
        return value
    if value.startswith(("{", "[")):
        return literal(value)
    if os.path.exists(value):  # noqa: PTH110 - a path may have a comma; Path.exists raises for a long list
        return [value]
    return [name.strip() for name in value.split(",")]


def _one_or_several(value: Any) -> Any:
    """The value of a setting that is one name, or several as JSON or with commas between them."""
    return _parsed(value) if isinstance(value, str) and ("," in value or value.startswith("[")) else value


Names = Annotated[list[str], BeforeValidator(_parsed)]
Settings = Annotated[dict[str, Any], BeforeValidator(_parsed)]


class EvalOptions(RowSettings, EnvironmentSettings, StackSettings, RuntimeSettings, RolloutLimits):
    """Which NeMo Gym environment to run, on which rows, and how."""

    # Flat, because an SDK's command line has an option for each field. Each base class is a part of `run_spec`, which takes
    # the part's fields out again, so a setting is declared once.

    model_config = ConfigDict(frozen=False)

    env: Annotated[str | list[str], BeforeValidator(_one_or_several)] = DEFAULT_ENVIRONMENT
    """NeMo Gym environment: a packaged name (`mcqa`) or the path of a config file. Several, as a list or with commas
    between them, run in one stack; each row then goes to the environment that has the agent in its `agent_ref`."""
    config: Annotated[str | list[str] | None, BeforeValidator(_one_or_several)] = None
    """Config of the environment, by file name without `.yaml`, or a YAML file; `None`: the default config. Several, as a list or
    with commas between them, are combined in order."""
    overrides: Settings = Field(default_factory=dict)
    """Settings for NeMo Gym's config parser, by dotted key."""
    models: Settings = Field(default_factory=dict)
    """Endpoint of each judge or user simulator, by instance name, `"*"` for all others: a base URL, `policy` (the rollout's
    own policy), `none` (start without an endpoint; a rollout that calls it fails), or the fields of `gymgate.HTTPEndpoint`."""
    gym: str = DEFAULT_NEMO_GYM
    """nemo-gym release."""
    env_vars: Names = Field(default_factory=list)
    """Names of environment variables that NeMo Gym's servers may see, e.g. keys of search services."""
    component_roots: Names = Field(default_factory=list)
    """Directories searched for your own servers, in addition to the installed nemo-gym."""
    dialect: Literal["chat", "responses"] = "chat"
    """API in which policy calls reach the SDK. Verifiers' training client takes `chat` only."""
    ray: Annotated[str | dict[str, Any] | None, BeforeValidator(literal)] = None
    """Ray cluster that runs the servers: `auto`, `HOST:PORT`, or the fields of `gymgate.RayCluster`; `None`: this machine."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = self.environment_names()
        single = {"config": self.config, "agent": self.agent, "overrides": self.overrides or None}
        if len(names) != 1 and (settings := [key for key, value in single.items() if value is not None]):
            raise ValueError(f"{', '.join(settings)} needs one env, not {len(names)} ({', '.join(names)})")
        holds_key = (
            name
            for name, value in self.models.items()
            if isinstance(value, Mapping) and value.get("api_key") is not None
        )
        if secret := next(holds_key, None):
            raise ValueError(
                f"models.{secret}.api_key would be saved with the run; give its environment variable: api_key_env"
            )
        try:
            self.run_spec()
        except ValidationError as error:
            raise ValueError(validation_message(error)) from None
        return self

    @property
    def name(self) -> str:
        """The environments' names, as run names and the dashboard show them."""
        return "+".join(Path(name).stem for name in self.environment_names())

    @property
    def is_demonstration(self) -> bool:
        """Whether this is the default environment on its example rows, with no number of rows given."""
        return self.env == DEFAULT_ENVIRONMENT and self.data == DEFAULT_DATA and self.rows is None

    def environment_names(self) -> tuple[str, ...]:
        """Return `env` as a tuple of names."""
        names = [self.env] if isinstance(self.env, str) else self.env
        return tuple(stripped for name in names if (stripped := name.strip()))

    def run_spec(self) -> RunSpec:
        """Return the run that these options describe; equal options give equal stacks."""
        # Flags arrive as strings, so a string that is a JSON literal becomes its value.
        overrides = {key: literal(value) for key, value in dotted(self.overrides)}
        stack = StackConfig(
            environments=tuple(
                EnvironmentConfig(
                    name=name,
                    config=self.config,
                    overrides=overrides,
                    **self._fields(EnvironmentSettings),
                )
                for name in self.environment_names()
            ),
            runtime=RuntimeConfig(version=self.gym, **self._fields(RuntimeSettings)),
            models={name: _endpoint(value) for name, value in self.models.items()},
            env_vars=self.env_vars,
            component_roots=self.component_roots,
            ray=self.ray,
            **self._fields(StackSettings),
        )
        limits = RolloutLimits(**self._fields(RolloutLimits))
        return RunSpec(stack=stack, limits=limits, **self._fields(RowSettings))

    def _fields(self, cls: type[Config]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in cls.model_fields}

    def find_environments(self, progress: Callable[[str], None]) -> dict[str, Environment]:
        """Return the catalog's entry for each environment, as `Catalog.environments_of` does; may install nemo-gym.

        Raises `ConfigError`, with similar names, for an unknown environment.
        """
        from gymgate.gym.runtime import open_catalog

        stack = self.run_spec().stack
        return open_catalog(stack.runtime, stack.component_roots, progress=progress).environments_of(
            stack.environments
        )


def _endpoint(value: Any) -> Any:
    if value is None:  # a command line's "none" may have been read as null
        return "none"
    if isinstance(value, str) and value not in ("policy", "none"):
        return {"type": "http", "base_url": value}
    return {"type": "http", **value} if isinstance(value, Mapping) else value
