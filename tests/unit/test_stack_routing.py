"""How a rollout's key reaches its model calls."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate import codec
from gymgate.errors import DataError
from gymgate.stack import routing
from gymgate.stack.routing import Strategy, strategy_for

ROW = {"responses_create_params": {"input": "hi", "metadata": {"a": "b"}}, "_ng_attempt_index": 1, "id": 7}


def routed_row(row: dict[str, Any], strategy: Strategy, **route: Any) -> dict[str, Any]:
    body: dict[str, Any] = codec.loads(routing.routed_row(codec.dumps(row), strategy, **route))
    return body


@pytest.mark.parametrize(
    ("agent", "version", "strategy"),
    [
        ("simple_agent", "0.7.0", "url"),
        ("claude_code_agent", "0.7.0", "url"),
        ("an_agent_of_the_users_own", "0.7.0", "url"),
        ("langgraph_agent", "0.7.0", "metadata"),
        ("mini_swe_agent", "0.7.0", "body"),
        ("harbor_agent", "0.7.0", "slot"),
        ("remote_agent", "0.7.0", "remote"),
        ("haystack_agent", "0.7.0", "metadata"),
        ("simple_agent", "0.4.0", "metadata"),
        ("claude_code_agent", "0.4.0", "slot"),
        ("simple_agent", "0.10.0rc1", "url"),
    ],
)
def test_strategy(agent: str, version: str, strategy: Strategy) -> None:
    assert strategy_for(agent, version) == strategy


def test_an_agent_with_the_policys_url_in_its_config_needs_slots() -> None:
    """Gym puts no key into a URL that is given; 0.4 puts none into any."""
    assert strategy_for("codex_agent", "0.7.0", own_urls=True) == "slot"
    assert strategy_for("simple_agent", "0.4.0", own_urls=True) == "metadata"


def test_url_goes_into_the_body_and_leaves_the_row_alone() -> None:
    """Gym would append its attempt index to the key."""
    body = routed_row(ROW, "url", key="k", base_url="u", metadata={})
    assert body == {"responses_create_params": ROW["responses_create_params"], "id": 7, "_ng_rollout_id": "k"}
    assert "_ng_rollout_id" not in ROW


def test_metadata_is_merged() -> None:
    body = routed_row(ROW, "metadata", key="k", base_url="u", metadata={"gymgate_route": "k"})
    assert body["responses_create_params"]["metadata"] == {"a": "b", "gymgate_route": "k"}
    assert ROW["responses_create_params"] == {"input": "hi", "metadata": {"a": "b"}}


def test_a_remote_service_is_told_where_its_policy_is() -> None:
    body = routed_row(ROW, "remote", key="k", base_url="http://h/v1", metadata={"gymgate_route": "k"})
    assert body["responses_create_params"]["metadata"] == {"a": "b", "gymgate_route": "http://h/v1"}


def test_metadata_that_is_full_is_the_rows_fault() -> None:
    full = {str(number): "" for number in range(16)}
    with pytest.raises(DataError, match="16 metadata entries"):
        routed_row(
            {"responses_create_params": {"metadata": full}},
            "metadata",
            key="k",
            base_url="u",
            metadata={"gymgate_route": "k"},
        )


def test_a_row_that_brings_entries_of_ours_is_given_the_routes() -> None:
    row = {**ROW, "_ng_rollout_id": "another's", "policy_api_key": "mine"}
    body = routed_row(row, "body", key="k", base_url="http://h", metadata={})
    assert (body["_ng_rollout_id"], body["policy_api_key"], body["policy_base_url"]) == ("k", "k", "http://h")


def test_metadata_that_is_no_object_is_the_rows_fault() -> None:
    with pytest.raises(DataError, match="metadata is a list"):
        routed_row(
            {"responses_create_params": {"metadata": ["a"]}},
            "metadata",
            key="k",
            base_url="u",
            metadata={"gymgate_route": "k"},
        )


def test_body_carries_the_policys_address() -> None:
    body = routed_row(ROW, "body", key="k", base_url="http://h/ng-rollout/k/v1", metadata={})
    assert (body["policy_base_url"], body["policy_api_key"]) == ("http://h/ng-rollout/k/v1", "k")
