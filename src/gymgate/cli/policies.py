"""From command-line options to the policy: an endpoint and its replicas, or recorded rollouts. Starts nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gymgate.cli.options import EndpointOptions, checked_url, key_value
from gymgate.cli.output import Log
from gymgate.config import HTTPEndpoint, ReplayEndpoint
from gymgate.dataset import Row, RowSource
from gymgate.errors import ConfigError, DataError, OptionError
from gymgate.serving.slurm_nodes import job_nodes

if TYPE_CHECKING:
    from gymgate.gateway.replay.recording import Recording

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
MODELS_TIMEOUT_S = 10.0
_SLURM = re.compile(r"slurm(?:/(\d+))?:(\d+)")


def policy_endpoint(given: EndpointOptions, log: Log) -> HTTPEndpoint:
    """The endpoint that `-b URL[,URL...]` and the options beside it describe. Raises as `http_endpoint`."""
    assert given.urls is not None
    first, *replicas = endpoint_list(given.urls)
    return http_endpoint(
        first,
        given.model,
        given.dialect,
        given.api_key_var,
        wait_s=given.wait_for_policy,
        log=log,
        replicas=tuple(replicas),
        sampling=sampling_fields(given.sampling),
        timeout_s=given.call_timeout,
    )


def http_endpoint(
    base_url: str,
    model: str | None,
    dialect: Literal["chat", "responses"],
    key_variable: str | None,
    *,
    wait_s: float | None = None,
    log: Log = lambda message: None,
    **fields: Any,
) -> HTTPEndpoint:
    """The policy endpoint. Without `model`, ask the endpoint for its only one, after waiting up to `wait_s` for it.

    `fields` are further fields of `HTTPEndpoint`. Raises `ConfigError` if `base_url` is not a URL, the named key variable
    is not set or the endpoint does not serve exactly one model, and `PolicyError` if it does not answer in time.
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

        asyncio.run(wait_until_ready(endpoint, wait_s, log))
    return endpoint.model_copy(update={"model": only_model(endpoint)})


def only_model(endpoint: HTTPEndpoint) -> str:
    """The model that an endpoint serves. Raises `ConfigError` if it cannot be reached or does not serve exactly one."""
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
        hint = (
            " (no key was sent; give it with --api-key-var)" if error.code in (401, 403) and not key else ""
        )
        raise ConfigError(
            f"name the model with -m: {url} answered {error.code} {error.reason}{hint}"
        ) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"endpoint {base_url!r} cannot be reached: {reason}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"name the model with -m: {url} answered no list of models") from None
    if len(models) != 1:
        raise ConfigError(f"name the model with -m; {base_url} serves {', '.join(models) or 'none'}")
    return models[0]


def refuse_without_endpoint(endpoint: EndpointOptions) -> None:
    """Raises `ConfigError` for options of an endpoint without one."""
    given = {
        "-m": endpoint.model,
        "--sampling": endpoint.sampling,
        "--api-key-var": endpoint.api_key_var,
        "--wait-for-policy": endpoint.wait_for_policy,
    }
    unusable = [name for name, value in given.items() if value not in (None, ())]
    if unusable and not endpoint.urls:
        raise ConfigError(f"{' and '.join(unusable)} needs an endpoint; name one: -b http://host:8000/v1")


def endpoint_list(text: str) -> list[str]:
    """The URLs in a comma-separated list.

    `slurm:PORT` stands for the nodes of this Slurm job, `slurm/GROUP:PORT` for those of one group of a heterogeneous
    job. Raises `OptionError` for an entry that is not a URL or is given twice.
    """
    addresses = [address for part in text.split(",") for address in _addresses(part.strip().rstrip("/"))]
    for address in addresses:
        if not address.startswith(("http://", "https://")):
            raise OptionError(
                f"-b {text!r}: {address!r} is not a URL; write http://host:8000/v1[,http://...]"
            )
        if addresses.count(address) > 1:
            raise OptionError(f"-b {text!r}: {address!r} is given twice")
    return addresses


def _addresses(entry: str) -> list[str]:
    match = _SLURM.fullmatch(entry)
    if match is None:
        return [entry]
    nodes = job_nodes(group=int(match[1]) if match[1] else None)
    return [f"http://{node}:{match[2]}/v1" for node in nodes]


def sampling_fields(texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """`KEY=VALUE` with YAML values, sorted by key. Raises `ConfigError`."""
    fields: dict[str, Any] = {}
    for text in texts:
        key, value = key_value("--sampling", text, ", such as temperature=0.7")
        if key == "seed":
            raise ConfigError(
                f"--sampling {text!r}: one seed would make every rollout the same; use --seeds of gymgate collect"
            )
        fields[key] = value
    return tuple(sorted(fields.items()))


def replay_files(files: Iterable[str]) -> tuple[str, ...]:
    """The files that `--replay-file` gives; a directory of `gymgate collect` stands for its rollouts, shards included.

    Raises `ConfigError` for what is not there.
    """
    from gymgate.collection.store import ROLLOUTS, run_directories

    found: list[str] = []
    for file in files:
        if not Path(file).exists():
            raise ConfigError(f"--replay-file {file!r}: there is no such file")
        if not Path(file).is_dir():
            found.append(file)
        elif runs := [run / ROLLOUTS for run in run_directories(Path(file)) if (run / ROLLOUTS).exists()]:
            found += map(str, runs)
        else:
            raise ConfigError(f"--replay-file {file!r}: there is no run of gymgate collect in this directory")
    return tuple(found)


def only_recorded(sources: Sequence[RowSource], endpoint: ReplayEndpoint, log: Log) -> list[RowSource]:
    """The sources without the rows that no recording answers: NeMo Gym ships rollouts of other rows, too.

    Rows that cannot be read stay, to be reported. Raises `ConfigError` for a source without any recorded row, and
    `DataError` for a recording that cannot be read.
    """
    from gymgate.gateway.replay.recording import recorded_rollouts

    recordings = [each for each in recorded_rollouts(endpoint.rollouts) if each.steps]
    return [_recorded(source, recordings, log) for source in sources]


def _recorded(source: RowSource, recordings: Sequence[Recording], log: Log) -> RowSource:
    from gymgate.gateway.replay.recording import recorded_rows

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
        name = source.environment or source.name
        log(f"{name}: {len(rows) - len(recorded)} of {len(whole)} rows have no recorded rollout")
    kept = [position for position, row in whole if isinstance(row, DataError) or id(row) in recorded]
    return replace(source, rows=_SelectedRows(source, kept))


class _SelectedRows(Sequence[Row]):
    """Some of the rows of a source, by their positions there."""

    def __init__(self, source: RowSource, positions: Sequence[int]) -> None:
        self.source = source.name
        self._rows = source.rows
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, position: Any) -> Any:
        return self._rows[self._positions[position]]
