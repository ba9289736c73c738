"""What the text of an option's value says. Every function raises `OptionError` for another form, and starts nothing."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from pydantic import SecretStr

from gymgate.cluster.slurm_nodes import job_nodes
from gymgate.core.addresses import masked_address
from gymgate.core.config import (
    DEFAULT_KEY_VARIABLE,
    DEFAULT_NEMO_GYM,
    POLICY,
    HTTPEndpoint,
    JudgeEndpoint,
    RuntimeConfig,
    dotted,
)
from gymgate.core.errors import ConfigError, OptionError
from gymgate.core.http_client import header_lines
from gymgate.gym.catalog.parse import parse_yaml, read_yaml
from gymgate.runs.described.prices import Price

_SLURM = re.compile(r"slurm(?:/(\d+))?:(\d+)")
_SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_a", "top_n_sigma", "mirostat"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "truncate_prompt_tokens"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "repeat_penalty", "length_penalty"),
        *("n", "best_of", "seed", "stop", "stop_token_ids", "stop_regex", "no_stop_trim", "ignore_eos"),
        *("include_stop_str_in_output", "logit_bias", "bad_words", "allowed_token_ids", "use_beam_search"),
        *("custom_logit_processor", "custom_params", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("skip_special_tokens", "spaces_between_special_tokens", "response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "grammar"),
        *("regex", "ebnf", "tool_choice", "parallel_tool_calls", "max_tool_calls", "text", "verbosity"),
        *("reasoning", "reasoning_effort", "include_reasoning", "separate_reasoning", "stream_reasoning"),
        *("thinking", "enable_thinking", "thinking_budget", "thinking_token_budget", "chat_template"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("extra_body", "mm_processor_kwargs", "service_tier", "priority", "cache_salt", "lora_path", "user"),
        *("metadata", "store", "include", "truncation", "return_token_ids", "return_tokens_as_token_ids"),
        *("provider", "models", "route", "transforms", "plugins"),
    }
)
"""Fields of a model call in OpenAI's two APIs, vLLM, SGLang, llama.cpp and OpenRouter. An endpoint may know others, too."""
_JUDGE_FORMS = "NAME=URL, NAME=MODEL@URL, NAME=policy or NAME=none"


def parse_runtime(text: str) -> RuntimeConfig:
    """Parse a nemo-gym release: `0.7.0`, `/path/to/python` or `0.7.0@/path/to/python`."""
    version, _, path = text.rpartition("@") if os.sep in text else (text, "", None)
    version = version or DEFAULT_NEMO_GYM
    try:
        Version(version)
    except InvalidVersion:
        raise OptionError(f"--gym: {version!r} is not a version; write e.g. {DEFAULT_NEMO_GYM}") from None
    return RuntimeConfig(version=version, interpreter=path)


def parse_prices(texts: Iterable[str]) -> dict[str, Price]:
    """Parse prices of model servers: `0.15,0.6` for the policy, or `NAME=0.15,0.6`."""
    prices = {}
    for text in texts:
        server, _, numbers = text.rpartition("=")
        try:
            price = Price(*map(float, numbers.split(",")))
        except (TypeError, ValueError):
            price = Price(math.nan, math.nan)
        if not all(0 <= dollars < math.inf for dollars in price):
            raise OptionError(f"--price: {text!r} is not two prices; write e.g. 0.15,0.60")
        prices[server or POLICY] = price
    return prices


def endpoint_list(text: str) -> list[str]:
    """Return the URLs in a comma-separated list.

    `slurm:PORT` stands for the nodes of this Slurm job, `slurm/GROUP:PORT` for those of one group of a heterogeneous
    job. Raises also for a duplicate.
    """
    addresses = [address for part in text.split(",") for address in _addresses(part.strip().rstrip("/"))]
    for address in addresses:
        if not re.match(r"https?://[^/]", address):
            raise OptionError(
                f"-b {masked_address(text)!r}: {masked_address(address)!r} is not a URL; write "
                "http://host:8000/v1[,http://...]"
            )
        if addresses.count(address) > 1:
            raise OptionError(f"-b: {masked_address(address)!r} is given twice")
    return addresses


def _addresses(entry: str) -> list[str]:
    match = _SLURM.fullmatch(entry)
    if match is None:
        return [entry]
    nodes = job_nodes(group=int(match[1]) if match[1] else None)
    return [f"http://{node}:{match[2]}/v1" for node in nodes]


def header_fields(texts: Iterable[str]) -> dict[str, SecretStr]:
    """Parse `NAME=VALUE`. No message repeats a value."""
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
    return headers


def sampling_fields(texts: Iterable[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` with YAML values. Raises `ConfigError` for a seed."""
    fields = dict(key_value("--sampling", text, ", e.g. temperature=0.7") for text in texts)
    if "seed" in fields:
        raise ConfigError(
            f"--sampling seed={fields['seed']}: one seed would make every rollout the same; use --seeds of gymgate run"
        )
    return fields


def doubtful_fields(fields: Iterable[str]) -> dict[str, str]:
    """Return the names that are no known field of a model call and resemble one, with that one."""
    doubtful = {}
    for name in {*fields} - _SAMPLING:
        plain = name.lower().replace("-", "_")
        for near_name in get_close_matches(plain, sorted(_SAMPLING), n=1, cutoff=0.75):
            doubtful[name] = near_name
    return dict(sorted(doubtful.items()))


def key_variable(name: str | None) -> str | None:
    """Return the variable that holds a key: `name`, else the default one if it is set."""
    return name or (DEFAULT_KEY_VARIABLE if os.environ.get(DEFAULT_KEY_VARIABLE) else None)


def parse_judges(texts: Iterable[str], key_vars: Iterable[str] = ()) -> dict[str, JudgeEndpoint]:
    """Parse `--judge` and `--judge-key-var` as model server -> endpoint. Raises `ConfigError` for variables that do not fit.

    An endpoint without a key variable takes the policy's default one, if it is set.
    """
    variables = _judge_key_vars(key_vars)
    endpoints: dict[str, JudgeEndpoint] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise OptionError(f"--judge {masked_address(text)!r}: write {_JUDGE_FORMS}")
        if value in ("policy", "none"):
            endpoints[name] = "policy" if value == "policy" else "none"
            continue
        # An address may have a login, and a model an @.
        if (parts := re.fullmatch(r"(?:(.+?)@)?(https?://.+)", value)) is None:
            shown, address = masked_address(text), masked_address(value)
            raise OptionError(f"--judge {shown!r}: {address!r} is not a URL; write {_JUDGE_FORMS}")
        model, url = parts.groups()
        variable = key_variable(variables.get(name, variables.get("*")))
        optional = {} if variable is None else {"api_key_env": variable}
        endpoints[name] = HTTPEndpoint(base_url=url, model=model, **optional)
    with_url = [name for name, endpoint in endpoints.items() if isinstance(endpoint, HTTPEndpoint)]
    if unused := sorted({*variables} - {"*", *with_url}):
        raise ConfigError(
            f"--judge-key-var {unused[0]}: no --judge {unused[0]}=URL is given; "
            f"judges with a URL: {', '.join(with_url) or 'none'}"
        )
    return endpoints


def _judge_key_vars(texts: Iterable[str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, _, variable = text.partition("=")
        if not (name and variable):
            raise OptionError(f"--judge-key-var {text!r}: write NAME=VAR")
        if not os.environ.get(variable):
            raise ConfigError(f"--judge-key-var {text!r}: environment variable {variable!r} is not set")
        variables[name] = variable
    return variables


def parse_overrides(texts: Iterable[str], names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """Parse `--set` by environment: `KEY=VALUE` (the value is YAML) or `@FILE` (a YAML mapping).

    Where there are several environments, `ENV:` stands before it.
    """
    overrides: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in texts:
        target, setting = _target(text, names)
        if setting.startswith("@"):
            path = Path(setting[1:]).expanduser()
            value = read_yaml(path, f"--set @{path}")
            if not isinstance(value, dict):
                raise ConfigError(f"--set @{path}: the file must hold a mapping of keys to values")
        else:
            key, _, rest = setting.partition("=")
            value = {key: yaml_value("--set", text, rest)}
        overrides[target].update(dotted(value))
    return overrides


def _target(text: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the environment that a setting is for, and the setting without its prefix."""
    prefixed = [name for name in names if text.startswith(f"{name}:")]
    setting = text.removeprefix(f"{prefixed[0]}:") if prefixed else text
    key, equals, _ = setting.partition("=")
    is_file = setting.startswith("@") and len(setting) > 1
    if (not prefixed and len(names) > 1) or not (is_file or (key and equals and ":" not in key)):
        several = f", ENV one of {', '.join(names)}" if len(names) > 1 else ""
        form = "ENV:KEY=VALUE or ENV:@FILE" if several else "KEY=VALUE or @FILE"
        raise OptionError(f"--set {text!r}: write {form}{several}")
    return (prefixed or list(names))[0], setting


def yaml_value(option: str, text: str, value: str) -> Any:
    """Return the value of `OPTION KEY=VALUE`, which is YAML."""
    try:
        return parse_yaml(value)
    except ValueError as error:
        raise OptionError(
            f"{option} {text!r}: the value is not YAML: {' '.join(str(error).split())}"
        ) from None


def key_value(option: str, text: str, example: str = "") -> tuple[str, Any]:
    """Return the key and the value of `OPTION KEY=VALUE`; `example` goes to the message of the error."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise OptionError(f"{option} {text!r}: write KEY=VALUE{example}")
    return key, yaml_value(option, text, value)
