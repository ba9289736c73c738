"""Configs are values: hashable at any depth, the same after a round trip, and without numbers that JSON has no word for."""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import orjson
import pytest
from pydantic import SecretStr, ValidationError

from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.gateway.backends.http import request_headers
from gymgate.stack.wire import endpoint_from_wire, endpoint_to_wire

NESTED: dict[str, Any] = {"stop": ["a", ["b"]], "response_format": {"type": "json", "keys": [{"k": [1]}]}}


def stack(sampling: Any) -> StackConfig:
    judge = HTTPEndpoint(base_url="http://h/v1", sampling=sampling)
    return StackConfig(environments=("mcqa",), models=(("judge", judge),))


@pytest.mark.parametrize("sampling", [NESTED, tuple(NESTED.items())], ids=["mapping", "pairs"])
def test_nested_values_of_an_endpoint_are_hashable_and_reach_the_request_as_they_were(sampling: Any) -> None:
    assert len({stack(sampling), stack(sampling), stack({"stop": ["b"]})}) == 2
    endpoint = dict(stack(sampling).models)["judge"]
    assert isinstance(endpoint, HTTPEndpoint)
    assert orjson.loads(orjson.dumps(dict(endpoint.sampling))) == NESTED


def test_sampling_and_overrides_are_frozen_alike() -> None:
    endpoint = HTTPEndpoint(base_url="http://h/v1", sampling=NESTED)  # type: ignore[arg-type]
    environment = EnvironmentConfig(name="mcqa", overrides=NESTED)  # type: ignore[arg-type]
    assert endpoint.sampling == environment.overrides
    assert hash(endpoint.sampling) == hash(environment.overrides)


def test_a_frozen_config_is_the_same_after_every_round_trip() -> None:
    config = stack(NESTED)
    assert StackConfig.model_validate_json(config.model_dump_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.model_copy(deep=True) == config
    endpoint = HTTPEndpoint(base_url="http://h/v1", sampling=NESTED)  # type: ignore[arg-type]
    assert endpoint_from_wire(endpoint_to_wire(endpoint)) == endpoint


def test_what_the_caller_keeps_does_not_change_the_config() -> None:
    given = {"stop": ["a"], "extra": {"k": [1]}}
    endpoint = HTTPEndpoint(base_url="http://h/v1", sampling=given)  # type: ignore[arg-type]
    before = hash(endpoint)
    given["stop"].append("b")  # type: ignore[attr-defined]
    given["extra"]["k"].append(2)  # type: ignore[call-overload]
    assert hash(endpoint) == before
    assert dict(endpoint.sampling)["stop"] == ("a",)


def test_headers_may_be_a_mapping_and_are_shown_nowhere() -> None:
    endpoint = HTTPEndpoint(base_url="http://h/v1", headers={"X-Team": "a", "api-key": "secret"})  # type: ignore[arg-type]
    assert "secret" not in f"{endpoint!r} {endpoint.model_dump_json()}"
    assert endpoint_from_wire(endpoint_to_wire(endpoint)) == endpoint
    assert {name: value.get_secret_value() for name, value in endpoint.headers} == {
        "X-Team": "a",
        "api-key": "secret",
    }


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_cannot_carry_are_refused(value: float) -> None:
    with pytest.raises(ValidationError, match="timeout_s"):
        RolloutLimits(timeout_s=value)
    with pytest.raises(ValidationError, match="linger_s"):
        StackConfig(environments=("mcqa",), linger_s=value)
    for nested in (value, [value], {"k": [value]}):
        with pytest.raises(ValidationError, match=r"bias.*finite"):
            HTTPEndpoint(base_url="http://h/v1", sampling=(("bias", nested),))


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), b"bytes", {1: "x"}], ids=["set", "object", "bytes", "key"]
)
def test_values_that_are_no_json_are_refused_with_their_type(value: Any) -> None:
    with pytest.raises(ValidationError, match="'stop'"):
        HTTPEndpoint(base_url="http://h/v1", sampling=(("stop", value),))


def test_a_key_is_read_from_its_variable_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = HTTPEndpoint(base_url="http://h/v1", api_key_env="SOME_KEY")
    given = endpoint.model_copy(update={"api_key": SecretStr("given")})
    monkeypatch.setenv("SOME_KEY", "from the variable")
    keys = [each.resolved().api_key for each in (endpoint, given)]
    assert [key and key.get_secret_value() for key in keys] == ["from the variable", "given"]
    monkeypatch.setenv("SOME_KEY", "")
    with pytest.raises(ConfigError, match="'SOME_KEY'"):
        endpoint.resolved()
    assert given.resolved() == given
    with pytest.raises(ConfigError, match=r"http.* not the name") as no_name:
        HTTPEndpoint(base_url="http://h/v1", api_key_env="sk-secret").resolved()
    assert "secret" not in str(no_name.value)


@pytest.mark.parametrize("url", ["foo", "", "host:8000/v1", "ftp://host/v1", "http://", "http:///v1"])
def test_an_endpoint_has_a_url(url: str) -> None:
    for fields in ({"base_url": url}, {"base_url": "http://h/v1", "replicas": (url,)}):
        with pytest.raises(ValidationError, match=re.escape(repr(url))):
            HTTPEndpoint(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dialect", "wrong", "right"),
    [
        ("chat", "max_output_tokens", "max_tokens"),
        ("responses", "max_tokens", "max_output_tokens"),
        ("responses", "max_completion_tokens", "max_output_tokens"),
    ],
)
def test_a_limit_of_the_other_api_is_refused(dialect: Any, wrong: str, right: str) -> None:
    """Servers that ignore unknown fields would set no limit."""
    with pytest.raises(ValidationError, match=f"{wrong}.*{right}"):
        HTTPEndpoint(base_url="http://h/v1", dialect=dialect, sampling={wrong: 64})
    assert HTTPEndpoint(base_url="http://h/v1", dialect=dialect, sampling={right: 64}).sampling


def test_a_short_release_is_the_supported_one() -> None:
    """As on a package index. So it has a lock, and shares runtime and stack with the whole number."""
    assert RuntimeConfig(version="0.7") == RuntimeConfig(version="0.7.0")
    assert RuntimeConfig(version="0.6").version == "0.6.0"
    assert [RuntimeConfig(version=each).version for each in ("0.8", "0.7.1rc1")] == ["0.8", "0.7.1rc1"]


def test_one_environment_needs_no_list() -> None:
    several = StackConfig(environments=("mcqa",))
    assert StackConfig(environments="mcqa") == several  # type: ignore[arg-type]
    assert StackConfig(environments=EnvironmentConfig(name="mcqa")) == several  # type: ignore[arg-type]
    assert StackConfig(environments=["mcqa"]) == several  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "sent"), [("Bearer mine", "Bearer mine"), (None, "Basic bWU6c2VjcmV0")])
def test_a_header_that_is_given_wins_over_a_login_in_the_address(given: str | None, sent: str) -> None:
    headers = {"authorization": given} if given else {}
    endpoint = HTTPEndpoint(base_url="http://me:secret@h/v1", headers=headers)
    assert request_headers(endpoint, endpoint.base_url).getall("Authorization") == [sent]
