"""How a rollout's key reaches its model calls."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate import codec
from gymgate.catalog.agentcode import AgentCode
from gymgate.errors import DataError
from gymgate.gateway.requests import without_attempt
from gymgate.stack import routing
from gymgate.stack.routing import KeyForwarding, Strategy, strategy_for

ROW = {"responses_create_params": {"input": "hi", "metadata": {"a": "b"}}, "_ng_attempt_index": 1, "id": 7}


URL = KeyForwarding("url", ("observability",), plain=True, client=True)
LENIENT_URL = KeyForwarding("url", ("observability",), plain=False, client=True)
INDICES = KeyForwarding("indices", ("observability",), plain=False, client=False)
NOTHING = KeyForwarding()
HELPERS = AgentCode(helpers=True, client=False, entries=True, policy_url=False)
CLIENT = AgentCode(helpers=False, client=True, entries=True, policy_url=False)
STRICT = AgentCode(helpers=True, client=False, entries=False, policy_url=False)
SILENT = AgentCode(helpers=False, client=False, entries=True, policy_url=False)
BY_BODY = AgentCode(helpers=True, client=False, entries=True, policy_url=True)


def routed_row(row: dict[str, Any], strategy: Strategy, **route: Any) -> dict[str, Any]:
    body: dict[str, Any] = codec.loads(routing.routed_row(codec.dumps(row), strategy, **route))
    return body


@pytest.mark.parametrize(
    ("agent", "forwarding", "code", "strategy"),
    [
        ("any_agent", URL, HELPERS, "url"),
        ("any_agent", URL, CLIENT, "url"),
        ("any_agent", URL, STRICT, "url"),
        ("any_agent", LENIENT_URL, STRICT, "process"),
        ("any_agent", URL, SILENT, "process"),
        ("any_agent", INDICES, HELPERS, "indices"),
        ("any_agent", INDICES, CLIENT, "process"),
        ("any_agent", NOTHING, HELPERS, "process"),
        ("any_agent", URL, BY_BODY, "body"),
        ("simple_agent", URL, HELPERS, "url"),
        ("simple_agent", NOTHING, SILENT, "metadata"),
        ("haystack_agent", URL, SILENT, "metadata"),
        ("critpt_agent", LENIENT_URL, STRICT, "metadata"),
        ("remote_agent", URL, HELPERS, "remote"),
        ("labbench2_vlm_agent", URL, HELPERS, "metadata"),
    ],
)
def test_strategy(agent: str, forwarding: KeyForwarding, code: AgentCode, strategy: Strategy) -> None:
    assert strategy_for(agent, forwarding, code) == strategy


def test_an_agent_with_the_policys_url_in_its_config_needs_a_process_per_rollout() -> None:
    """Gym puts no key into a URL that is given."""
    assert strategy_for("codex_agent", URL, HELPERS, own_urls=True) == "process"


def test_indices_name_the_rollout_where_there_is_no_id() -> None:
    """Of the two NeMo Gym makes `<task>-<rollout>`; the gateway takes a key with an attempt's suffix for the key."""
    row = {**ROW, "_ng_task_index": 4}
    key = "0123456789abcdef" * 2
    body = routed_row(row, "indices", key=key, base_url="u", metadata={})
    assert "_ng_rollout_id" not in body
    assert without_attempt(f"{body['_ng_task_index']}-{body['_ng_rollout_index']}") == key
    assert row["_ng_task_index"] == 4


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


def test_no_number_of_a_row_that_is_parsed_for_its_key_changes() -> None:
    row = {**ROW, "id": 12345678901234567890123}
    for strategy in ("metadata", "remote", "url"):
        route = {"key": "k", "base_url": "u", "metadata": {"gymgate_route": "k"}}
        assert routed_row(row, strategy, **route)["id"] == 12345678901234567890123
