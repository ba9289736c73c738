"""Needs of environments that a stack's config leaves open: a judge's endpoint, a sandbox's provider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gymgate.core.config import EnvironmentConfig, RuntimeConfig, StackConfig
from gymgate.core.errors import NeedMissingError
from gymgate.gym.catalog import Environment
from gymgate.gym.catalog.needs import refuse_unanswered
from gymgate.gym.catalog.parse import read_yaml
from gymgate.gym.catalog.sandboxes import packaged_providers, refuse_undefined, sandbox_block
from gymgate.gym.inside.resolve import provider_in
from gymgate.gym.runtime import Runtime, find_runtime
from gymgate.gym.runtime.sandbox_providers import (
    PROVIDERS,
    provider_requirements,
    undeclared_variables,
    usable_choices,
)

TELEMETRY = "telemetry"
"""Block of a config: OpenTelemetry of NeMo Gym's servers."""
TELEMETRY_REQUIREMENTS = (
    "nemo-lens[sdk]>=0.2",  # with 0.1, servers of 0.7.0 export nothing, without a word
    "opentelemetry-instrumentation-aiohttp-client>=0.60b0",
    "opentelemetry-instrumentation-fastapi>=0.60b0",
)
"""Those of nemo-gym 0.7.0's extra `telemetry`."""
WITHOUT_TELEMETRY = ("0.6.0",)
"""Releases that know the block and whose servers do not read it."""
REPLAYED_JUDGES = (
    "; recorded rollouts answer for the policy alone: `gymgate check {}` replays the judges' answers, too"
)


def require_needs(
    stack: StackConfig,
    environments: Iterable[Environment],
    *,
    replayed: bool = False,
    option: str | None = None,
) -> None:
    """Raise `NeedMissingError` for a judge without an endpoint or a sandbox without a provider, as far as files show them.

    The stack checks again when it starts: only NeMo Gym itself knows what overrides and another agent change. `replayed`:
    recorded rollouts answer for the policy, which they cannot do for a judge. `option` gives judges endpoints, in place
    of `--judge`.
    """
    answered = {name for name, _ in stack.models}
    for spec, environment in zip(stack.environments, environments, strict=True):
        if spec.agent is None and not spec.overrides:
            _require_sandbox(spec, environment, stack.runtime)
            judges = dict(environment.config(spec.config).judges)
            hint = REPLAYED_JUDGES.format(environment.known_as) if replayed else ""
            refuse_unanswered(environment.name, judges, answered, option=option, hint=hint)


def _require_sandbox(spec: EnvironmentConfig, environment: Environment, runtime: RuntimeConfig) -> None:
    """Raise `NeedMissingError` for a sandbox that neither the options nor the environment's files define."""
    references = environment.config(spec.config).sandboxes
    if spec.sandbox is None and any(reference.provider is None for reference in references):
        installed = find_runtime(runtime)
        choices = usable_choices(packaged_providers(installed.site) if installed else PROVIDERS)
        refuse_undefined(environment.name, references, choices)


def sandbox_requirements(
    spec: EnvironmentConfig, runtime: Runtime, env_vars: Sequence[str]
) -> tuple[str, ...]:
    """Return what the chosen sandbox provider needs installed. Raises `ConfigError` and `NeedMissingError`."""
    if spec.sandbox is None:
        return ()
    provider = str(provider_in(sandbox_block(spec.sandbox, runtime.site)))
    if unseen := undeclared_variables(provider, env_vars):
        options = " ".join(f"--env-var {name}" for name in unseen)
        raise NeedMissingError(
            f"sandbox provider {provider!r} reads {' and '.join(unseen)}: set it and give {options}, in Python "
            f"StackConfig(env_vars={tuple(unseen)!r})",
            environment=spec.name,
            need=", ".join(unseen),
        )
    return provider_requirements(provider)


def telemetry_requirements(spec: EnvironmentConfig, files: Iterable[Path], version: str) -> tuple[str, ...]:
    """Return what a release's telemetry needs installed, if a config file or an override switches it on."""
    enabled = False
    for file in files:
        config = read_yaml(file, "config")
        block = config.get(TELEMETRY) if isinstance(config, dict) else None
        if isinstance(block, dict):
            enabled = block.get("enabled", enabled)
    for name, value in spec.overrides:
        key = name.lstrip("+")
        if key == f"{TELEMETRY}.enabled":
            enabled = value
        elif key == TELEMETRY and isinstance(value, Mapping):
            enabled = value.get("enabled", enabled)
    return TELEMETRY_REQUIREMENTS if enabled and version not in WITHOUT_TELEMETRY else ()
