"""How a rollout's key reaches its model calls."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate.core import codec
from gymgate.core.errors import DataError
from gymgate.stack.daemon import routing
from gymgate.stack.daemon.routing import Strategy, strategy_for

ROW = {"responses_create_params": {"input": "hi", "metadata": {"a": "b"}}, "_ng_attempt_index": 1, "id": 7}


def routed_row(row: dict[str, Any], strategy: Strategy, **route: Any) -> dict[str, Any]:
    body: dict[str, Any] = codec.loads(routing.routed_row(codec.dumps(row), strategy, **route))
    return body


ELSEWHERE: dict[str, dict[Strategy, set[str]]] = {
    "0.7.0": {
        "metadata": {"finance_agent", "haystack_agent", "labbench2_vlm_agent", "langgraph_agent"},
        "body": {"mini_swe_agent", "mini_swe_agent_2"},
        "remote": {"remote_agent"},
        "process": {"harbor_agent", "harbor_agent_general"},
    },
    "0.6.0": {
        "metadata": {
            "critpt_agent",
            "finance_agent",
            "labbench2_vlm_agent",
            "langgraph_agent",
            "scicode_agent",
        },
        "body": {"mini_swe_agent", "mini_swe_agent_2"},
        "remote": {"remote_agent"},
        "process": {"anyswe_agent", "harbor_agent", "swe_agents", "verifiers_agent"},
    },
}
"""Packaged agents that are routed otherwise than by URL, as their code was read by people."""


@pytest.mark.parametrize("version", ELSEWHERE)
def test_packaged_agents(version: str) -> None:
    expected = {agent: strategy for strategy, agents in ELSEWHERE[version].items() for agent in agents}
    assert {agent: strategy_for(agent, version) for agent in expected} == expected
    for agent in ("simple_agent", "codex_agent", "an_agent_of_ones_own"):
        assert strategy_for(agent, version) == "url"


def test_another_release_is_routed_like_the_supported_one_before_it() -> None:
    for newer in ("0.7.0rc1", "0.8.0", "1.0.0.dev1"):
        assert strategy_for("scicode_agent", newer) == strategy_for("scicode_agent", "0.7.0") == "url"
    for older in ("0.4.0", "0.6.1"):
        assert strategy_for("scicode_agent", older) == strategy_for("scicode_agent", "0.6.0") == "metadata"


def test_an_agent_with_the_policys_url_in_its_config_needs_a_process_per_rollout() -> None:
    """Gym puts no key into a URL that is given."""
    assert strategy_for("codex_agent", "0.7.0", own_urls=True) == "process"


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
    with pytest.raises(DataError, match="metadata"):
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


def test_no_number_of_a_row_that_is_parsed_for_its_key_changes() -> None:
    row = {**ROW, "id": 12345678901234567890123}
    for strategy in ("metadata", "remote", "url"):
        route = {"key": "k", "base_url": "u", "metadata": {"gymgate_route": "k"}}
        assert routed_row(row, strategy, **route)["id"] == 12345678901234567890123
