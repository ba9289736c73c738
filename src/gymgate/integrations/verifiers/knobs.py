"""The knobs and the stack that they describe, without verifiers: known before its import, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from gymgate.config import (
    DEFAULT_MAX_CALLS,
    DEFAULT_NEMO_GYM,
    EnvironmentConfig,
    RolloutLimits,
    RuntimeConfig,
    StackConfig,
)
from gymgate.integrations.verifiers.requirement import DEFAULT_DATA, DEFAULT_ENVIRONMENT


class Knobs(BaseModel):
    """Which NeMo Gym environment to run, on which rows, and how."""

    env: str | list[str] = DEFAULT_ENVIRONMENT
    """NeMo Gym environment: a packaged name (`mcqa`) or a path to a config of your own. Several, as a list or
    with commas between them, run in one stack; each row then goes where its `agent_ref` says."""
    data: str = DEFAULT_DATA
    """Rows: a packaged file by name (`example`), a JSONL path, or `hf:owner/name[:split]`."""
    tasks: int | None = Field(None, ge=1)
    """Rows to load at most. `None`: all of them; but the default environment's example gives one where
    `-n` does not say otherwise, so that `-r 100` is 100 rollouts of one task."""
    config: str | None = None
    """Which of the environment's configs (file stem); `None`: its default one."""
    agent: str | None = None
    """Agent instance for rows without `agent_ref`; `None`: the config's only or first one."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings for Gym's config parser, by dotted key."""
    models: dict[str, Any] = Field(default_factory=dict)
    """Endpoint of each further model server that the config names (judges, user simulators), by instance name,
    `"*"` for all: `policy` (the rollout's own policy), `none` (start without; a rollout that calls it fails), a base URL, or
    an endpoint as in `gymgate.HTTPEndpoint`."""
    gym: str = DEFAULT_NEMO_GYM
    """nemo-gym release."""
    python: str | None = None
    """Interpreter to build NeMo Gym's virtual environment with; `None`: found on this machine."""
    interpreter: str | None = None
    """An interpreter that already has nemo-gym, used as it is."""
    env_vars: list[str] = Field(default_factory=list)
    """Names of environment variables that Gym's servers may see (keys of search services and the like)."""
    component_roots: list[str] = Field(default_factory=list)
    """Directories searched for servers of your own, beside the installed nemo-gym."""
    dialect: Literal["chat", "responses"] = "chat"
    """API in which policy calls reach verifiers. Its training client takes `chat` only."""
    timeout_s: float = Field(3600.0, gt=0, allow_inf_nan=False)
    """Seconds one rollout may take, verification included."""
    max_calls: int | None = Field(DEFAULT_MAX_CALLS, ge=1)
    """Policy calls after which a rollout is cut off; `None`: no bound."""
    agent_processes: int = Field(4, ge=1)
    """Concurrent rollouts for agents that cannot forward the rollout key. Each runs in its own process; the rest queue."""
    start_timeout_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    """Seconds until Gym's servers must be up (installing nemo-gym is not counted)."""
    hang_timeout_s: float | None = Field(900.0, gt=0, allow_inf_nan=False)
    """Seconds without an answer and without use of the processor after which a server is restarted; `None`: never."""
    linger_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Seconds that the servers stay up after the last user has gone."""
    share: Literal["process", "machine"] = "process"
    """Who shares the servers: this process, or all of this user's on this machine (env-server workers)."""

    @model_validator(mode="before")
    @classmethod
    def _of_saved_run(cls, given: Any) -> Any:
        """Read `agent_slots`, as runs saved earlier call `agent_processes`."""
        if isinstance(given, Mapping) and "agent_slots" in given:
            given = {**given, "agent_processes": given["agent_slots"]}
            del given["agent_slots"]
        return given

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = self.environment_names()
        single = {"config": self.config, "agent": self.agent, "overrides": self.overrides or None}
        if len(names) != 1 and (given := [key for key, value in single.items() if value is not None]):
            raise ValueError(f"{', '.join(given)} needs one env, not {len(names)} ({', '.join(names)})")
        if secret := [name for name, value in self.models.items() if _holds_key(value)]:
            raise ValueError(
                f"models.{secret[0]}.api_key would be saved with the run; name its variable: api_key_env"
            )
        try:
            self.stack_config()
            self.limits()
        except ValidationError as error:
            raise ValueError(_one_line(error)) from None
        return self

    @property
    def name(self) -> str:
        """In run names and on the dashboard: the environments."""
        return "+".join(Path(name).stem for name in self.environment_names())

    @property
    def is_demonstration(self) -> bool:
        """Whether this is the default environment on its example rows, nothing else said."""
        return self.env == DEFAULT_ENVIRONMENT and self.data == DEFAULT_DATA and self.tasks is None

    def environment_names(self) -> tuple[str, ...]:
        """`env` as a tuple of names."""
        names = self.env.split(",") if isinstance(self.env, str) else self.env
        return tuple(stripped for name in names if (stripped := name.strip()))

    def stack_config(self) -> StackConfig:
        """The stack that these knobs describe; equal knobs give equal stacks."""
        environments = tuple(
            EnvironmentConfig(
                name=name,
                config=self.config,
                agent=self.agent,
                overrides=tuple(sorted(_dotted(self.overrides))),
            )
            for name in self.environment_names()
        )
        return StackConfig(
            environments=environments,
            runtime=RuntimeConfig(version=self.gym, python=self.python, interpreter=self.interpreter),
            models=tuple(sorted((name, _endpoint(value)) for name, value in self.models.items())),
            env_vars=tuple(self.env_vars),
            component_roots=tuple(self.component_roots),
            agent_processes=self.agent_processes,
            start_timeout_s=self.start_timeout_s,
            hang_timeout_s=self.hang_timeout_s,
            linger_s=self.linger_s,
            share=self.share,
        )

    def limits(self) -> RolloutLimits:
        """Bounds on each rollout."""
        return RolloutLimits(timeout_s=self.timeout_s, max_calls=self.max_calls)


def _dotted(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key; flags arrive as strings, so a string that is a JSON literal becomes that."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _dotted(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _literal(item)


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _endpoint(value: Any) -> Any:
    if value is None:  # what a command line's "none" may have become
        return "none"
    if value in ("policy", "none") or not isinstance(value, str):
        return {"type": "http", **value} if isinstance(value, Mapping) else value
    return {"type": "http", "base_url": value}


def _holds_key(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("api_key") is not None


def _one_line(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    )
