"""Sandbox providers in configs: the settings that a release ships for each, and how a chosen one enters a config.

Servers name a block (`sandbox_provider: sandbox`) that another config defines, or hold the provider's settings themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gymgate.core.errors import ConfigError, NeedMissingError
from gymgate.gym.catalog.parse import copied, merge, read_yaml
from gymgate.gym.inside.resolve import (
    DEFAULT_METADATA,
    Node,
    SandboxReference,
    provider_in,
    sandbox_references,
    value_at,
)

_OWN = Path(__file__).with_name("providers")
"""Settings of providers for which NeMo Gym ships none."""
_SHIPPED = "nemo_gym/sandbox/providers/{0}/configs/{0}.yaml"
DOCKER = "docker"
LOCAL = "local"
"""The provider that runs commands on this machine, without a boundary."""


def packaged_providers(site: Path) -> dict[str, Path]:
    """Return the file with the settings of each provider that the installed nemo-gym has, by name, sorted."""
    paths: dict[str, Path] = {}
    for directory in sorted((site / "nemo_gym" / "sandbox" / "providers").glob("*/")):
        name = directory.name
        files = (site / _SHIPPED.format(name), _OWN / f"{name}.yaml")
        if path := next((path for path in files if path.is_file()), None):
            paths[name] = path
    return paths


def sandbox_block(sandbox: str, site: Path) -> Node:
    """Return the settings of a provider, by its name or in a YAML file: `{provider: {...}, "default_metadata": {...}}`.

    A file holds such a block, or one top-level key with it, as NeMo Gym's own. Raises `ConfigError`.
    """
    packaged = packaged_providers(site)
    path = packaged.get(sandbox) or Path(sandbox).expanduser()
    if sandbox not in packaged and path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"there is no sandbox provider {sandbox!r}; this nemo-gym has {', '.join(packaged) or 'none'}. Give one "
            "of these, or the path of a YAML file with a provider's settings"
        )
    value = block = read_yaml(path, f"sandbox {sandbox!r}")
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) not in packaged:
        block = next(iter(value.values()))
    if not isinstance(block, dict) or provider_in(block) is None:
        keys = ", ".join(map(str, block)) if isinstance(block, dict) else type(block).__name__
        raise ConfigError(
            f"sandbox {sandbox!r} must hold the settings of one provider, as in "
            f"`sandbox: {{docker: {{...}}}}`; it has {keys or 'nothing'}"
        )
    return block


def choose_provider(config: Node, block: Node) -> None:
    """Give a resolved config the provider in `block`, in place of the one that its servers have.

    Settings of this provider that the config has already stay: they are overrides, or the environment's own.
    """
    provider = provider_in(block)
    assert provider is not None
    for reference in sandbox_references(config):
        key = reference.name or reference.setting
        settings = copied(block[provider] or {})
        merge(settings, _mapping(value_at(config, f"{key}.{provider}")))
        chosen = {provider: settings}
        if reference.name is not None:
            metadata = _mapping(value_at(config, f"{key}.{DEFAULT_METADATA}"))
            chosen[DEFAULT_METADATA] = {**metadata, **_mapping(block.get(DEFAULT_METADATA))}
        parent, _, last = key.rpartition(".")
        (value_at(config, parent) if parent else config)[last] = chosen


def providers_of(config: Mapping[str, Any]) -> list[tuple[str, Node]]:
    """Return the name and the settings of each provider that the servers of a resolved config use. Change these in place."""
    providers: dict[str, tuple[str, Node]] = {}
    for reference in sandbox_references(config):
        key = reference.name or reference.setting
        block = value_at(config, key)
        if reference.provider is not None and isinstance(block, dict):
            settings = block[reference.provider]
            providers[key] = reference.provider, settings if isinstance(settings, dict) else {}
    return [*providers.values()]


def with_labels(config: Node, labels: Mapping[str, str]) -> Node:
    """Return a resolved config whose Docker containers get labels, beside the arguments that it gives `docker run`."""
    config = copied(config)
    for name, settings in providers_of(config):
        if name == DOCKER:
            create = settings.setdefault("create", None) or {}
            arguments = [word for label in labels.items() for word in ("--label", "=".join(label))]
            settings["create"] = {
                **create,
                "extra_run_args": [*(create.get("extra_run_args") or ()), *arguments],
            }
    return config


def refuse_undefined(environment: str, references: tuple[SandboxReference, ...], choices: str) -> None:
    """Raise `NeedMissingError` if one of the servers names a sandbox that no config defines.

    `choices` says which providers can be used here.
    """
    missing = [reference for reference in references if reference.provider is None]
    if not missing:
        return
    settings = ", ".join(dict.fromkeys(reference.setting for reference in missing))
    raise NeedMissingError(
        f"environment {environment!r} runs in sandboxes, and no config says which provider makes them ({settings}): give "
        f"--sandbox NAME, in Python EnvironmentConfig(sandbox=NAME); {choices}",
        environment=environment,
        need="sandbox",
        kind="docker",
    )


def _mapping(value: Any) -> Node:
    return value if isinstance(value, dict) else {}
