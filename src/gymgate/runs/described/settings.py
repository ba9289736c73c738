"""The settings that make two runs one: everything that can change a reward, so not the addresses of endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymgate.core.addresses import without_login
from gymgate.core.config import HTTPEndpoint, RolloutLimits, dotted
from gymgate.runs.described.plan import RolloutPlan
from gymgate.stack.content import is_secret, variable_digests
from gymgate.stack.description import endpoint_settings, resolved_source

if TYPE_CHECKING:
    from gymgate.stack import Policy

_COUNT = re.compile(r"tokens?[\d_-]*$", re.IGNORECASE)
"""A number so named is no secret: `max_tokens`."""
_PARAMETER = re.compile(r"(?i)(?<=[?&])([\w-]*(?:key|token|secret|password|auth)=)[^&#\s]+")
"""A secret in the query of a URL."""


OF_THE_STACK = ("nemo_gym", "interpreter", "environments", "judges", "models")
"""Settings that a stack reports once it is up: see `Stack.description`."""
NOTED = {"interpreter", "salt", "middlewares"}
"""Settings that are no difference between runs: they can change no reward, or say nothing by themselves."""


def settings_of(
    policy: Policy,
    limits: RolloutLimits,
    sources: Sequence[str],
    variables: Sequence[str] = (),
    salt: str = "",
) -> dict[str, Any]:
    """Return a run's settings apart from those of its stack, as JSON values, without the policy's key, headers and address.

    Of the environment variables that its servers see there are digests, with the run's salt; keys, which may be renewed,
    are left out.
    """
    values = [name for name in variables if not is_secret(name)]
    unused = None if isinstance(policy, HTTPEndpoint) else {"context_overflow"}
    return {
        "sources": [resolved_source(source) for source in sources],
        "policy": endpoint_settings(policy),
        "limits": limits.model_dump(exclude=unused),
        **({"salt": salt, "variables": variable_digests(values, salt)} if values else {}),
    }


def is_example(sources: Sequence[str]) -> bool:
    """Whether all rows of a run are its environments' examples, by the sources in its settings."""
    return [*sources] == ["example"]


def example_note(count: int) -> str:
    """Return what every table over example rows says of them."""
    return f"{count} example {'row' if count == 1 else 'rows'}, not the benchmark"


def context_overflow_of(settings: Mapping[str, Any]) -> str | None:
    """Return a run's `context_overflow`; `None` if it has no endpoint. Runs from before there was a choice refused."""
    limits, policy = settings.get("limits"), settings.get("policy")
    is_endpoint = isinstance(policy, Mapping) and policy.get("type") == "http"
    return (
        str(limits.get("context_overflow", "refuse")) if isinstance(limits, Mapping) and is_endpoint else None
    )


def extent_of(plan: RolloutPlan) -> dict[str, Any]:
    """Return the settings that may grow from one run to the next, as JSON values."""
    return {
        "rollouts": plan.total(),
        "rows": plan.rows,
        "repeats": plan.repeats,
        "seeds": list(plan.seeds) if plan.seeds is not None else None,
        "shard": [plan.shard.index, plan.shard.count],
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two runs' settings, as `name: OLD there, NEW here`.

    What only a stack knows is no difference where it has not reported it, and neither is where a file lies. Digests of
    variables with different salts tell nothing.
    """
    ignored = {*OF_THE_STACK} - (before.keys() & now.keys()) | NOTED
    if before.get("salt") != now.get("salt") and "salt" in before and "salt" in now:
        ignored.add("variables")
    old, new = (
        leaves({name: value for name, value in _unplaced(settings).items() if name not in ignored})
        for settings in (before, now)
    )
    return [
        f"{name}: {_shown(old.get(name))} there, {_shown(new.get(name))} here"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _unplaced(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the names of row files only."""
    if isinstance(sources := settings.get("sources"), list | tuple):
        return {**settings, "sources": [Path(str(source)).name for source in sources]}
    return dict(settings)


def policy_name(policy: Mapping[str, Any] | None) -> str:
    """Return the model's name, or what took its place; `rollouts` where the settings have no policy."""
    if not policy:
        return "rollouts"
    if policy.get("type") == "replay":
        return "recorded answers"
    return str(policy.get("model") or policy.get("name") or "policy")


def leaves(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings by dotted key, those of its environments by their number."""
    numbered = {
        name: dict(enumerate(value)) if _is_of_mappings(value) else value for name, value in settings.items()
    }
    return {key: value for key, value in dotted(numbered) if value != {}}


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings by dotted key, for a place where others see them: without what may be a secret."""
    environments = [
        {**item, "overrides": dict(item["overrides"])} if isinstance(item.get("overrides"), list) else item
        for item in settings.get("environments") or ()
    ]
    by_key = leaves({**settings, **({"environments": environments} if environments else {})})
    return {name: _masked(name, value) for name, value in by_key.items()}


def _masked(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {inner: _masked(f"{name}.{inner}", item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(name, item) for item in value]
    if value is not None and is_secret(name) and not (_COUNT.search(name) and isinstance(value, int)):
        return "***"
    return _PARAMETER.sub(r"\1***", without_login(value)) if isinstance(value, str) else value


def _is_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
