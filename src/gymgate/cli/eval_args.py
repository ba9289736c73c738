"""The verifiers command line that `gymgate eval run` stands for. Reads settings; imports nothing heavy."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gymgate.errors import ConfigError

REPLAY_KEY_VARIABLE = "GYMGATE_REPLAY_KEY"
"""API key variable of a run against the replay policy; nobody sets it, and a saved run is known by it."""

LOADERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def split_taskset(args: Sequence[str], default: str) -> tuple[str | None, list[str]]:
    """The leading taskset id, if any, and the rest; `default` where neither it nor a config file names one."""
    rest = list(args)
    if rest and not rest[0].startswith(("-", "@")):
        return rest[0], rest[1:]
    named = any(arg.startswith("@") or _key(arg) == "env.taskset.id" for arg in rest)
    return (None if named else default), rest


def resume_args(directory: str) -> list[str]:
    """The arguments that resume the run saved in `directory`; `ConfigError` if none is."""
    saved = Path(directory) / "configs" / "resolved" / "eval.json"
    if not saved.is_file():
        raise ConfigError(f"{directory!r} is no saved run: {saved} does not exist")
    return ["@", str(saved), "--resume"]


def read_settings(args: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value of what config files and flags say, flags last, as verifiers reads them."""
    settings: dict[str, Any] = {}
    for path in _files(args):
        settings.update(_flatten(_load(path)))
    for position, arg in enumerate(args):
        if (key := _key(arg)) is None:
            continue
        if "=" in arg:
            settings[key] = arg.split("=", 1)[1]
        else:
            follows = args[position + 1] if position + 1 < len(args) else "--"
            settings[key] = True if follows.startswith("--") else follows
    return settings


def environment_names(settings: Mapping[str, Any], default: str) -> list[str]:
    """The environments that the settings name."""
    value = settings.get("env.taskset.env", default)
    names = value.split(",") if isinstance(value, str) else value
    return [stripped for name in names if (stripped := str(name).strip())]


def _key(arg: str) -> str | None:
    return arg.removeprefix("--").split("=", 1)[0].replace("-", "_") if arg.startswith("--") else None


def _files(args: Sequence[str]) -> Iterator[Path]:
    """Config files at the root: `@ path` or `@path`, not one that follows a flag."""
    for position, arg in enumerate(args):
        if not arg.startswith("@") or (position and args[position - 1].startswith("--")):
            continue
        name = arg[1:] or (args[position + 1] if position + 1 < len(args) else "")
        yield Path(name)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        value = LOADERS[path.suffix](path.read_text())
    except KeyError:
        raise ConfigError(f"config file {str(path)!r} is neither TOML, JSON nor YAML") from None
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {str(path)!r}: {' '.join(str(error).split())}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"config file {str(path)!r} holds no settings")
    return value


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = f"{prefix}{key.replace('-', '_')}"
        if isinstance(item, Mapping):
            yield from _flatten(item, f"{name}.")
        elif item is not None:
            yield name, item
