"""Needs of environments that a stack's config leaves open, as far as files show them."""

from __future__ import annotations

from collections.abc import Iterable

from gymgate.catalog import Environment
from gymgate.catalog.needs import refuse_unanswered
from gymgate.catalog.sandboxes import packaged_providers, refuse_undefined
from gymgate.config import EnvironmentConfig, RuntimeConfig, StackConfig
from gymgate.runtime import find_runtime
from gymgate.runtime.sandboxes import PROVIDERS, usable_choices

REPLAYED_JUDGES = (
    "; recorded rollouts answer for the policy alone: `gymgate check {}` replays the judges' answers, too"
)


def require_needs(
    stack: StackConfig, found: Iterable[Environment], *, replayed: bool = False, option: str | None = None
) -> None:
    """Raise `NeedMissingError` for a judge without an endpoint or a sandbox without a provider.

    The stack checks again when it starts: only NeMo Gym itself knows what overrides and another agent change. `replayed`:
    recorded rollouts answer for the policy, which they cannot do for a judge. `option` gives judges endpoints, in place
    of `--judge`.
    """
    named = {name for name, _ in stack.models}
    for spec, environment in zip(stack.environments, found, strict=True):
        if spec.agent is None and not spec.overrides:
            _require_sandbox(spec, environment, stack.runtime)
            judges = dict(environment.config(spec.config).judges)
            hint = REPLAYED_JUDGES.format(environment.known_as) if replayed else ""
            refuse_unanswered(environment.name, judges, named, option=option, hint=hint)


def _require_sandbox(spec: EnvironmentConfig, environment: Environment, runtime: RuntimeConfig) -> None:
    """Raise `NeedMissingError` for a sandbox that neither the options nor the environment's files define."""
    references = environment.config(spec.config).sandboxes
    if spec.sandbox is None and any(each.provider is None for each in references):
        found = find_runtime(runtime)
        choices = usable_choices(packaged_providers(found.site) if found else PROVIDERS)
        refuse_undefined(environment.name, references, choices)
