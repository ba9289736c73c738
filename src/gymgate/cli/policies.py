"""From command-line options to the policy's endpoint and its replicas. Starts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import SecretStr

from gymgate.cli.options import EndpointOptions, checked_url, key_value, key_variable
from gymgate.cli.output import Log
from gymgate.cluster.slurm_nodes import job_nodes
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import ConfigError, OptionError
from gymgate.core.http_client import header_lines
from gymgate.runs.policies import asked_endpoint

_SLURM = re.compile(r"slurm(?:/(\d+))?:(\d+)")


def policy_endpoint(options: EndpointOptions, log: Log) -> HTTPEndpoint:
    """Return the endpoint that `-b URL[,URL...]` and its options describe, after asking it. Raises as `asked_endpoint`."""
    endpoint = HTTPEndpoint(**{"api_key_env": key_variable(None), **endpoint_fields(options)})
    return asked_endpoint(endpoint, options.wait_for_policy or 0, log)


def endpoint_fields(options: EndpointOptions) -> dict[str, Any]:
    """Return the fields of `HTTPEndpoint` that options set. Raises `OptionError`."""
    fields = dict(options.fields)
    if options.urls is not None:
        first, *replicas = endpoint_list(options.urls)
        fields |= {"base_url": checked_url(first), "replicas": tuple(replicas)}
    if options.headers:
        fields["headers"] = header_fields(options.headers)
    if options.sampling:
        fields["sampling"] = sampling_fields(options.sampling)
    return fields


def header_fields(texts: Iterable[str]) -> tuple[tuple[str, SecretStr], ...]:
    """Parse `NAME=VALUE` of `--header`. Raises `ConfigError`, which does not repeat a value."""
    headers = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise OptionError("--header: write NAME=VALUE")
        try:
            header_lines({name: value})
        except ValueError as error:
            raise OptionError(f"--header {name!r}: {error}") from None
        headers[name] = SecretStr(value)
    return tuple(headers.items())


def refuse_without_endpoint(endpoint: EndpointOptions, *, is_there: bool | None = None) -> None:
    """Raises `ConfigError` for options of an endpoint if none `is_there`; by default, if `-b` is not given."""
    if endpoint.given and not (bool(endpoint.urls) if is_there is None else is_there):
        raise ConfigError(
            f"{' and '.join(endpoint.given)} needs an endpoint; give one: -b http://host:8000/v1"
        )


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
        key, value = key_value("--sampling", text, ", e.g. temperature=0.7")
        if key == "seed":
            raise ConfigError(
                f"--sampling {text!r}: one seed would make every rollout the same; use --seeds of gymgate run"
            )
        fields[key] = value
    return tuple(sorted(fields.items()))
