"""How a rollout's key reaches its model calls, agent by agent, since agents differ in what they pass on.

url       `_ng_rollout_id` in the body of `/run` puts `/ng-rollout/<key>` before the path of every model call
          (nemo-gym 0.5 and later)
metadata  an entry in `responses_create_params.metadata`, which the agent sends to the model unchanged
remote    the same entry, in place of the key the base URL of the rollout's policy: the row goes to a service of the user's
body      `policy_base_url` and `policy_api_key` in the body of `/run`
slot      the agent passes nothing on: each process of it serves one rollout at a time and has gateway ports of its own
none      its config sends its model calls elsewhere than to the gateway: its rows are refused
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from gymgate import codec
from gymgate.errors import ConfigError, DataError

Strategy = Literal["url", "metadata", "remote", "body", "slot", "none"]

ROLLOUT_ID = "_ng_rollout_id"
ATTEMPT_INDEX = "_ng_attempt_index"
MAX_METADATA = 16
"""Entries that the Responses API allows."""

BEFORE_URLS = (0, 5)
BY_METADATA: frozenset[Strategy] = frozenset({"metadata", "remote"})
_URL_LOST: Mapping[str, Strategy] = {
    "finance_agent": "metadata",
    "langgraph_agent": "metadata",
    "labbench2_vlm_agent": "metadata",
    "mini_swe_agent": "body",
    "mini_swe_agent_2": "body",
    "haystack_agent": "metadata",
    "harbor_agent": "slot",
    "harbor_agent_general": "slot",
    "remote_agent": "remote",
}
"""0.5 and later: agents whose model calls do not carry the URL's key."""
_METADATA_KEPT = frozenset(
    {
        "simple_agent",
        "non_executing_simple_agent",
        "tool_simulation_agent",
        "speed_bench_agent",
        "browsecomp_agent",
        "critpt_agent",
        "cvdp_agent",
        "finance_agent",
        "gymnasium_agent",
        "aviary_agent",
        "labbench2_vlm_agent",
        "langgraph_agent",
        "proof_refinement_agent",
        "scicode_agent",
    }
)
"""Before 0.5: agents that send `responses_create_params` to the model as it came."""


def strategy_for(agent_type: str, version: str, *, own_urls: bool = False) -> Strategy:
    """How to route an agent, by its implementation's name and nemo-gym's version.

    `own_urls`: it is configured with the policy's URL in place of a model server, to which Gym adds no key.
    """
    if release(version) < BEFORE_URLS:
        return "metadata" if agent_type in _METADATA_KEPT else "slot"
    return "slot" if own_urls else _URL_LOST.get(agent_type, "url")


def release(version: str) -> tuple[int, int]:
    """Major and minor number."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def refuse_unroutable(agent: str, agent_type: str, version: str) -> ConfigError:
    """The error for an agent of strategy `none`."""
    return ConfigError(
        f"agent {agent!r} ({agent_type}, nemo-gym {version}) is given a model of its own by a URL in its config, so its "
        f"calls would not reach the policy; give it model_server: {{type: responses_api_models, name: policy_model}} or "
        f"the URL ${{policy_base_url}}"
    )


def routed_row(
    row: bytes, strategy: Strategy, *, key: str, base_url: str, metadata: Mapping[str, str]
) -> bytes:
    """The body for `/run`, as JSON: the row, which stays as it is, with what routes it.

    Raises `DataError` for a row whose metadata has no room for that.
    """
    if strategy in BY_METADATA:
        body = _parsed(row)
        entries = dict.fromkeys(metadata, base_url) if strategy == "remote" else metadata
        body["responses_create_params"] = _with_metadata(body["responses_create_params"], entries)
        return codec.dumps(body)
    entries = {ROLLOUT_ID: key}
    if strategy == "body":
        entries |= {"policy_base_url": base_url, "policy_api_key": key}
    if any(name.encode() in row for name in (ATTEMPT_INDEX, *entries)):
        return codec.dumps({**_parsed(row), **entries})
    return row[:-1] + b"," + codec.dumps(entries)[1:]


def _parsed(row: bytes) -> dict[str, Any]:
    """The row without the index that Gym would append to the key."""
    try:
        value: dict[str, Any] = codec.loads(row)
    except ValueError as error:
        raise DataError(f"row is {error}") from None
    value.pop(ATTEMPT_INDEX, None)
    return value


def _with_metadata(params: Mapping[str, Any], entries: Mapping[str, str]) -> dict[str, Any]:
    metadata = params.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise DataError(
            f"row's responses_create_params.metadata is a {type(metadata).__name__}, not an object"
        )
    merged = {**metadata, **entries}
    if len(merged) > MAX_METADATA:
        raise DataError(
            f"row has {len(merged) - len(entries)} metadata entries; this agent needs one of the "
            f"{MAX_METADATA} that the Responses API allows"
        )
    return {**params, "metadata": merged}
