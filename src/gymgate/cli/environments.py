"""From command-line options to the environments of a stack: release, overrides, judges, variables. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymgate.cli.options import key_variable, yaml_value
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, JudgeEndpoint, dotted
from gymgate.core.errors import ConfigError, DataError, OptionError
from gymgate.gym.catalog.parse import read_yaml

_JUDGE_FORMS = "NAME=URL, NAME=MODEL@URL, NAME=policy or NAME=none"


def environment_configs(
    names: Sequence[str],
    config: Sequence[str],
    agent: str | None,
    settings: Sequence[str],
    *,
    sandbox: str | None = None,
) -> tuple[EnvironmentConfig, ...]:
    """One config per environment. Raises `ConfigError` for `--config` or `--agent` with several environments."""
    if len(names) > 1 and (wrong := [o for o, v in (("--config", config), ("--agent", agent)) if v]):
        raise ConfigError(
            f"{' and '.join(wrong)} can be given for one environment only, not for {len(names)}"
        )
    overrides = _overrides(names, settings)
    return tuple(
        EnvironmentConfig(
            name=name,
            config=config_names(config),
            agent=agent,
            sandbox=sandbox,
            overrides=tuple(overrides[name].items()),
        )
        for name in names
    )


def config_names(names: Sequence[str]) -> str | tuple[str, ...] | None:
    """The values of `--config` as `EnvironmentConfig` takes them."""
    return names[0] if len(names) == 1 else tuple(names) or None


def checked_env_vars(names: Sequence[str]) -> tuple[str, ...]:
    """Variables that the environments may see. Raises `ConfigError` for one that is not set here."""
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigError(f"environment variable {missing[0]!r} is not set (--env-var)")
    return tuple(sorted({*names}))


def parse_judges(texts: Sequence[str], key_vars: Sequence[str] = ()) -> dict[str, JudgeEndpoint]:
    """Parse `--judge` and `--judge-key-var` as model server -> endpoint. Raises `ConfigError`.

    An endpoint without a key variable takes the policy's default one, if it is set.
    """
    variables = _judge_key_vars(key_vars)
    endpoints: dict[str, JudgeEndpoint] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise OptionError(f"--judge {text!r}: write {_JUDGE_FORMS}")
        if value in ("policy", "none"):
            endpoints[name] = "policy" if value == "policy" else "none"
            continue
        model, _, url = value.rpartition("@")
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"--judge {text!r}: {url!r} is not a URL; write {_JUDGE_FORMS}")
        variable = key_variable(variables.get(name, variables.get("*")))
        endpoint = HTTPEndpoint(base_url=url, model=model or None)
        endpoints[name] = (
            endpoint if variable is None else endpoint.model_copy(update={"api_key_env": variable})
        )
    with_url = [name for name, endpoint in endpoints.items() if isinstance(endpoint, HTTPEndpoint)]
    if unused := sorted({*variables} - {"*", *with_url}):
        raise ConfigError(
            f"--judge-key-var {unused[0]}: no --judge {unused[0]}=URL is given; "
            f"judges with a URL: {', '.join(with_url) or 'none'}"
        )
    return endpoints


def _judge_key_vars(texts: Sequence[str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, _, variable = text.partition("=")
        if not (name and variable):
            raise OptionError(f"--judge-key-var {text!r}: write NAME=VAR")
        if not os.environ.get(variable):
            raise ConfigError(f"--judge-key-var {text!r}: environment variable {variable!r} is not set")
        variables[name] = variable
    return variables


def _overrides(names: Sequence[str], settings: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """`KEY=VALUE` (the value is YAML) or `@FILE` (a YAML mapping), after `ENV:` where there are several environments."""
    overrides: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in settings:
        target, rest = _target(text, names)
        if rest.startswith("@"):
            overrides[target].update(dotted(_yaml_file(Path(rest[1:]).expanduser())))
            continue
        key, _, value = rest.partition("=")
        parsed = yaml_value("--set", text, value)
        overrides[target].update(dotted({key: parsed}))
    return overrides


def _target(text: str, names: Sequence[str]) -> tuple[str, str]:
    """The environment that a setting is for, and the setting without its prefix."""
    prefixed = [name for name in names if text.startswith(f"{name}:")]
    rest = text.removeprefix(f"{prefixed[0]}:") if prefixed else text
    key, equals, _ = rest.partition("=")
    is_file = rest.startswith("@") and len(rest) > 1
    if (not prefixed and len(names) > 1) or not (is_file or (key and equals and ":" not in key)):
        several = f", ENV one of {', '.join(names)}" if len(names) > 1 else ""
        form = "ENV:KEY=VALUE or ENV:@FILE" if several else "KEY=VALUE or @FILE"
        raise OptionError(f"--set {text!r}: write {form}{several}")
    return (prefixed or list(names))[0], rest


def _yaml_file(path: Path) -> dict[str, Any]:
    value = read_yaml(path, f"--set @{path}")
    if not isinstance(value, dict):
        raise ConfigError(f"--set @{path}: the file must hold a mapping of keys to values")
    return value


def writable_path(path: Path) -> Path:
    """A path at which a file or a directory can be made. Raises `DataError` otherwise."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise DataError(f"cannot write {path}: {parent} is not a directory", path=str(path))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {path}: {parent} is not writable", path=str(path))
    return path
