"""The verifiers command line that `gymgate eval run` stands for, and the settings in one. Imports nothing heavy."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gymgate.cli.environments import environment_configs, parse_judges
from gymgate.cli.policies import endpoint_list, sampling_fields
from gymgate.config import dotted
from gymgate.errors import ConfigError
from gymgate.integrations.knobs import DEFAULT_ENVIRONMENT
from gymgate.integrations.verifiers.knobs import PLUGIN_ID

REPLAY_KEY_VARIABLE = "GYMGATE_REPLAY_KEY"
"""API key variable of an eval that replays recorded rollouts. It is never set; a resumed run is recognised by it."""
FLAGS = {
    "data": "--env.taskset.data",
    "sandbox": "--env.taskset.sandbox",
    "routing": "--env.taskset.routing",
    "gateway_host": "--env.taskset.gateway-host",
    "agent": "--env.taskset.agent",
    "timeout": "--env.taskset.timeout-s",
    "agent_processes": "--env.taskset.agent-processes",
    "max_calls": "--env.taskset.max-calls",
    "rows": "-n",
    "repeats": "-r",
    "concurrency": "-c",
    "output": "--output-dir",
    "api_key_var": "--client.api-key-var",
    "model": "--model",
}
"""Option of `gymgate eval run` -> the verifiers flag that takes the same value."""
WHOLE = ("env.taskset.models", "env.taskset.overrides")
"""Settings that are mappings, whose keys are names as they stand."""
LOADERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def verifiers_args(args: Sequence[str], options: Mapping[str, Any], given: Collection[str]) -> list[str]:
    """Return verifiers' command line: `args` as they are, then our options as verifiers' flags.

    `given` are the names of the options on our command line. The others hold defaults, which must not override a config
    file. Raises `ConfigError` for options that do not fit the taskset or one another.
    """
    if options["resume"]:
        if wrong := sorted({*given} - {"args", "resume", "push"}):
            raise ConfigError(
                f"--resume takes every setting from the saved run; leave out {', '.join(wrong)}"
            )
        return [*resume_args(options["resume"]), *args]
    own = with_taskset(args)
    flags = {flag: options[name] for name, flag in FLAGS.items() if name in given} | _converted(
        options, given
    )
    foreign = [flag for flag in flags if flag.startswith("--env.taskset.")]
    if foreign and not own[0].startswith(("-", "@", PLUGIN_ID)):
        raise ConfigError(f"{foreign[0]} is a setting of {PLUGIN_ID}, which taskset {own[0]!r} does not have")
    if "-c" not in flags and "max_concurrent" not in read_settings(own):
        flags["-c"] = options["concurrency"]
    push = [] if options["push"] or "--push" in own else ["--no-push"]
    return [*own, *(part for flag, value in flags.items() for part in (flag, str(value))), *push]


def _converted(options: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The flags whose values verifiers writes differently."""
    flags: dict[str, Any] = {}
    if names := options["environments"]:
        flags["--env.taskset.env"] = ",".join(names)
    if options["config"]:
        flags["--env.taskset.config"] = ",".join(options["config"])
    if "gym" in given:
        runtime = options["gym"]
        flags["--env.taskset.gym"] = runtime.version
        if runtime.interpreter is not None:
            flags["--env.taskset.interpreter"] = runtime.interpreter
    if options["judges"] or options["judge_key_vars"]:
        endpoints = {
            name: endpoint if isinstance(endpoint, str) else endpoint.model_dump(exclude_unset=True)
            for name, endpoint in parse_judges(options["judges"], options["judge_key_vars"]).items()
        }
        flags["--env.taskset.models"] = json.dumps(endpoints)
    if options["settings"]:
        first, *others = environment_configs(names or (DEFAULT_ENVIRONMENT,), (), None, options["settings"])
        if others:
            raise ConfigError("--set takes one environment here; name one --env, or use `gymgate run`")
        flags["--env.taskset.overrides"] = json.dumps(dict(first.overrides))
    if options["env_vars"]:
        flags["--env.taskset.env-vars"] = json.dumps(options["env_vars"])
    if "hang_timeout" in given:
        flags["--env.taskset.hang-timeout-s"] = options["hang_timeout"] or None
    if options["urls"]:
        url, *replicas = endpoint_list(options["urls"])
        if replicas:
            raise ConfigError(
                "verifiers calls one endpoint, and -b names several; `gymgate run` takes replicas"
            )
        flags["--client.base-url"] = url
    for name, value in sampling_fields(options["sampling"]):
        flags[f"--sampling.{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flags


def with_taskset(args: Sequence[str]) -> list[str]:
    """Put our taskset's id first where neither an argument nor a config file names a taskset."""
    named = bool(args) and not args[0].startswith("-")
    if named or any(arg.startswith("@") or _key(arg) == "env.taskset.id" for arg in args):
        return [*args]
    return [PLUGIN_ID, *args]


def resume_args(directory: str) -> list[str]:
    """Return the arguments that resume the run saved in `directory`; raises `ConfigError` if there is none."""
    saved = Path(directory) / "configs" / "resolved" / "eval.json"
    if not saved.is_file():
        raise ConfigError(f"{directory!r} is not the directory of a saved run: {saved} does not exist")
    return ["@", str(saved), "--resume"]


def read_settings(args: Sequence[str]) -> dict[str, Any]:
    """Return dotted key -> value from config files and then flags, as verifiers reads them."""
    settings: dict[str, Any] = {}
    for path in _files(args):
        for name, value in dotted(_load(path), whole=WHOLE):
            if value not in (None, {}):
                settings[name.replace("-", "_")] = value
    if args and not args[0].startswith(("-", "@")):
        settings["env.taskset.id"] = args[0]
    for position, arg in enumerate(args):
        if (key := _key(arg)) is None:
            continue
        if "=" in arg:
            settings[key] = arg.split("=", 1)[1]
        else:
            follows = args[position + 1] if position + 1 < len(args) else "--"
            settings[key] = True if follows.startswith("--") else follows
    return settings


def is_replayed(settings: Mapping[str, Any]) -> bool:
    """Whether the policy is recorded rollouts: there is no endpoint, or only that of the saved run's replay server."""
    return "client.base_url" not in settings or settings.get("client.api_key_var") == REPLAY_KEY_VARIABLE


def _key(arg: str) -> str | None:
    return arg.removeprefix("--").split("=", 1)[0].replace("-", "_") if arg.startswith("--") else None


def _files(args: Sequence[str]) -> Iterator[Path]:
    """Yield the config files at the root (`@ path` or `@path`), not one that follows a flag."""
    for position, arg in enumerate(args):
        if not arg.startswith("@") or (position and args[position - 1].startswith("--")):
            continue
        yield Path(arg[1:] or (args[position + 1] if position + 1 < len(args) else ""))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        value = LOADERS[path.suffix](path.read_text())
    except KeyError:
        raise ConfigError(
            f"config file {str(path)!r}: its name must end in .toml, .json, .yaml or .yml"
        ) from None
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {str(path)!r}: {' '.join(str(error).split())}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"config file {str(path)!r} has no settings: it must hold a mapping")
    return value
