"""What a `gymgate run` is to do: which rows, with which policy, on which stack. Reads files; starts nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import yaml

from gymgate.catalog import Environment
from gymgate.catalog.needs import refuse_unanswered
from gymgate.cli.options import EnvironmentOptions, checked_url
from gymgate.config import (
    EnvironmentConfig,
    HTTPEndpoint,
    JudgeEndpoint,
    ReplayEndpoint,
    RuntimeConfig,
    StackConfig,
)
from gymgate.dataset import Row, RowSource, open_rows
from gymgate.errors import ConfigError, DataError

if TYPE_CHECKING:
    from gymgate.gateway.replay import Recording

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
MODELS_TIMEOUT_S = 10.0
REPLAYED_JUDGES = (
    "; recorded rollouts are replayed for the policy alone: `gymgate check {}` replays judges, too"
)
_JUDGE_FORMS = "NAME=URL, NAME=MODEL@URL, NAME=policy or NAME=none"


class Job(NamedTuple):
    """One rollout to run."""

    row: Row | DataError
    """The row, or why it cannot be read."""
    environment: str | None
    """`None`: the row's `agent_ref` says which."""
    repeat: int
    """0-based."""


def sources(data: str, environments: Sequence[Environment], limit: int | None) -> list[RowSource]:
    """Where the rows come from: each environment's packaged data, or one file for all of them."""
    is_file = data.startswith("hf:") or os.sep in data or Path(data).expanduser().is_file()
    if len(environments) > 1 and is_file:
        return [RowSource(open_rows(data, environment=None), None, limit)]
    return [RowSource(open_rows(data, environment=each), each.name, limit) for each in environments]


def jobs(found: Sequence[RowSource], repeats: int) -> Iterator[Job]:
    """Every rollout to run, rows read as they are reached."""
    for source in found:
        for _, row in source.readable():
            for repeat in range(repeats):
                yield Job(row, source.environment, repeat)


class _Some(Sequence[Row]):
    """Some of the rows of a source, by their positions there."""

    def __init__(self, source: RowSource, positions: Sequence[int]) -> None:
        self.source = source.name
        self._rows = source.rows
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, position: int) -> Row: ...
    @overload
    def __getitem__(self, position: slice) -> list[Row]: ...
    def __getitem__(self, position: int | slice) -> Row | list[Row]:
        if isinstance(position, slice):
            return [self._rows[index] for index in self._positions[position]]
        return self._rows[self._positions[position]]


def only_recorded(
    found: Sequence[RowSource], endpoint: ReplayEndpoint, note: Callable[[str], None]
) -> list[RowSource]:
    """The sources without packaged rows that no recording answers: NeMo Gym ships rollouts of other rows, too.

    Rows that cannot be read stay, to be reported. Raises `ConfigError` for a source of which nothing is left to run.
    """
    from gymgate.gateway.replay import recorded_rollouts

    recordings = recorded_rollouts(endpoint.rollouts)
    return [_recorded(source, recordings, note) for source in found]


def _recorded(source: RowSource, recordings: Sequence[Recording], note: Callable[[str], None]) -> RowSource:
    from gymgate.gateway.replay import recorded_rows

    source.refuse_empty()
    whole = list(replace(source, limit=None).readable())
    rows = [row for _, row in whole if isinstance(row, Row)]
    recorded = {id(row) for row in recorded_rows(recordings, rows)}
    if not recorded and rows:
        raise ConfigError(
            f"none of the {len(whole)} rows of {source.environment or source.name} has a recorded rollout to replay; name a "
            "policy endpoint: -b http://host:8000/v1, or recordings of these rows: --replay-file FILE"
        )
    if len(recorded) < len(rows):
        note(
            f"{source.environment}: {len(rows) - len(recorded)} of {len(whole)} rows have no recorded rollout"
        )
    left = [position for position, row in whole if isinstance(row, DataError) or id(row) in recorded]
    return replace(source, rows=_Some(source, left))


def http_endpoint(
    base_url: str,
    model: str | None,
    dialect: Literal["chat", "responses"],
    key_variable: str | None,
    *,
    wait_s: float | None = None,
    say: Callable[[str], None] = lambda message: None,
    **fields: Any,
) -> HTTPEndpoint:
    """The policy endpoint; without a model name, the only model that it serves, for which it may be waited `wait_s`.

    `fields` are further fields of `HTTPEndpoint`.

    Raises `ConfigError` if `base_url` is no URL, a key variable that was named is not set or the endpoint does not tell
    its model, and `PolicyError` if it does not answer in time.
    """
    checked_url(base_url)
    variable = key_variable or (DEFAULT_KEY_VARIABLE if os.environ.get(DEFAULT_KEY_VARIABLE) else None)
    endpoint = HTTPEndpoint(
        base_url=base_url, dialect=dialect, model=model, api_key_env=variable, **fields
    ).resolved()
    if model:
        return endpoint
    if wait_s:
        from gymgate.gateway.backends.ready import wait_until_ready

        asyncio.run(wait_until_ready(endpoint, wait_s, say))
    return endpoint.model_copy(update={"model": only_model(endpoint)})


def only_model(endpoint: HTTPEndpoint) -> str:
    """The model that an endpoint serves; `ConfigError` if it cannot be reached or does not serve exactly one."""
    *others, last = endpoint.base_urls
    for base_url in others:
        with contextlib.suppress(ConfigError):
            return _model_at(base_url, endpoint)
    return _model_at(last, endpoint)


def _model_at(base_url: str, endpoint: HTTPEndpoint) -> str:
    url = f"{base_url}/models"
    key = endpoint.api_key.get_secret_value() if endpoint.api_key else None
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=MODELS_TIMEOUT_S) as answer:
            models = [str(item["id"]) for item in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        raise ConfigError(f"name the model with -m: {url} answered {error.code} {error.reason}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"endpoint {base_url!r} cannot be reached: {reason}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"name the model with -m: {url} answered no list of models") from None
    if len(models) != 1:
        serves = ", ".join(models) or "none"
        raise ConfigError(f"name the model with -m; {base_url} serves {serves}")
    return models[0]


def replay(environments: Sequence[Environment], files: Sequence[str]) -> ReplayEndpoint:
    """The recorded rollouts of environments, or those in files; `ConfigError` for an environment without."""
    if files:
        return ReplayEndpoint(rollouts=tuple(files))
    for environment in environments:
        if not environment.recordings():
            raise ConfigError(
                f"environment {environment.name!r} ships no recorded rollouts to replay; name a policy endpoint: "
                "-b http://host:8000/v1, or recordings: --replay-file FILE"
            )
    return ReplayEndpoint(
        rollouts=tuple(str(file.path) for each in environments for file in each.recordings())
    )


def judges(given: Sequence[str]) -> dict[str, JudgeEndpoint]:
    """`NAME=URL`, `NAME=MODEL@URL`, `NAME=policy` or `NAME=none`, as model server -> endpoint."""
    found: dict[str, JudgeEndpoint] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--judge {text!r}: write {_JUDGE_FORMS}")
        if value in ("policy", "none"):
            found[name] = "policy" if value == "policy" else "none"
            continue
        model, _, url = value.rpartition("@")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--judge {text!r}: {url!r} is not a URL; write {_JUDGE_FORMS}")
        found[name] = HTTPEndpoint(base_url=url, model=model or None)
    return found


def require_judges(stack: StackConfig, found: Sequence[Environment], *, replayed: bool) -> None:
    """Raise `NeedMissingError` for a judge without an endpoint, as far as the files say it; the stack checks it again.

    What `--set` and `--agent` change is left to the stack, which has NeMo Gym read the config. `replayed`: the policy
    is recorded rollouts, which answer for the policy alone.
    """
    named = {name for name, _ in stack.models}
    for spec, environment in zip(stack.environments, found, strict=True):
        if spec.agent is None and not spec.overrides:
            judges = dict(environment.config(spec.config).judges)
            hint = REPLAYED_JUDGES.format(environment.known_as) if replayed else ""
            refuse_unanswered(environment.name, judges, named, hint=hint)


def environment_configs(
    names: Sequence[str], config: str | None, agent: str | None, settings: Sequence[str]
) -> tuple[EnvironmentConfig, ...]:
    """The stack's environments; options that are for one environment are refused where there are several."""
    if len(names) > 1 and (wrong := [o for o, v in (("--config", config), ("--agent", agent)) if v]):
        raise ConfigError(
            f"{' and '.join(wrong)} can be given for one environment only, not for {len(names)}"
        )
    overrides = _overrides(names, settings)
    return tuple(
        EnvironmentConfig(name=name, config=config, agent=agent, overrides=tuple(overrides[name].items()))
        for name in names
    )


def stack_config(
    environments: Sequence[str], given: EnvironmentOptions, runtime: RuntimeConfig
) -> StackConfig:
    """The stack for environments with the options given; `ConfigError` for what does not fit."""
    return StackConfig(
        environments=environment_configs(environments, given.config, given.agent, given.settings),
        runtime=runtime,
        models=tuple(sorted(judges(given.judges).items())),
        env_vars=env_vars(given.env_vars),
        agent_processes=given.agent_processes,
        hang_timeout_s=given.hang_timeout or None,
    )


def env_vars(names: Sequence[str]) -> tuple[str, ...]:
    """Variables that an environment is to see; `ConfigError` for one that is not set here."""
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigError(f"environment variable {missing[0]!r} is not set (--env-var)")
    return tuple(sorted({*names}))


def _overrides(names: Sequence[str], settings: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """`KEY=VALUE` (the value is YAML) or `@FILE` (a YAML mapping), with `ENV:` before it where there are several."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in settings:
        target, rest = _target(text, names)
        if rest.startswith("@"):
            found[target].update(_dotted(_yaml_file(Path(rest[1:]).expanduser())))
            continue
        key, _, value = rest.partition("=")
        parsed = _yaml(text, value)
        found[target].update(
            _dotted(parsed, f"{key}.") if isinstance(parsed, dict) and parsed else {key: parsed}
        )
    return found


def _target(text: str, names: Sequence[str]) -> tuple[str, str]:
    """The environment that a setting is for, and the setting."""
    prefixed = [name for name in names if text.startswith(f"{name}:")]
    rest = text.removeprefix(f"{prefixed[0]}:") if prefixed else text
    key, equals, _ = rest.partition("=")
    is_file = rest.startswith("@") and len(rest) > 1
    if (not prefixed and len(names) > 1) or not (is_file or (key and equals and ":" not in key)):
        several = f", ENV one of {', '.join(names)}" if len(names) > 1 else ""
        form = "ENV:KEY=VALUE or ENV:@FILE" if several else "KEY=VALUE or @FILE"
        raise ConfigError(f"--set {text!r}: write {form}{several}")
    return (prefixed or list(names))[0], rest


def _yaml_file(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--set @{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--set @{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--set @{path}: it holds no mapping of keys to values")
    return value


def _dotted(value: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _dotted(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _yaml(text: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"--set {text!r}: the value is not YAML: {problem}") from None


def checked(path: Path) -> Path:
    """A file that results can be appended to; `DataError` otherwise, before anything is run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise DataError(f"cannot write results to {path}: {error.strerror}", path=str(path)) from error
    return path


def checked_place(path: Path) -> Path:
    """A path at which a file or a directory can be made, which it is not yet; `DataError` otherwise."""
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir():
        raise DataError(f"cannot write {path}: {there} is no directory", path=str(path))
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {path}: {there} belongs to somebody else", path=str(path))
    return path
