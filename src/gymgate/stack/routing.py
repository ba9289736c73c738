"""How a rollout's key reaches its model calls. Agents and releases differ in what they forward.

url       `_ng_rollout_id` in the body of `/run` puts `/ng-rollout/<key>` before the path of every model call
indices   `_ng_task_index` and `_ng_rollout_index` do the same, in releases that know no `_ng_rollout_id`
metadata  an entry in `responses_create_params.metadata`, which the agent sends to the model unchanged
remote    the same entry with the base URL of the rollout's policy: the row goes to a service of the user
body      `policy_base_url` and `policy_api_key` in the body of `/run`
process   the agent cannot forward the key: each of its processes serves one rollout and has gateway ports of its own
none      its config sends its model calls past the gateway: its rows are refused

The installed release decides which of them an agent takes, not its version number: its base classes are tried
(`KeyForwarding`) and the agent's code is read (`AgentCode`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gymgate import codec
from gymgate.catalog.agentcode import AgentCode
from gymgate.config import POLICY
from gymgate.errors import ConfigError, DataError

Strategy = Literal["url", "indices", "metadata", "remote", "body", "process", "none"]

ROLLOUT_ID = "_ng_rollout_id"
TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"
ATTEMPT_INDEX = "_ng_attempt_index"
MAX_METADATA = 16
"""Entries that the Responses API allows."""

BY_METADATA: frozenset[Strategy] = frozenset({"metadata", "remote"})
BY_URL: tuple[Literal["url", "indices"], ...] = ("url", "indices")
"""Best first."""
_CHOSEN: Mapping[str, Strategy] = {
    "labbench2_vlm_agent": "metadata",  # makes a new body, and 0.7 leaves the rollout's id out of it
    "remote_agent": "remote",
}
"""Agents whose code does not show their strategy."""
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
        "haystack_agent",
        "langgraph_agent",
        "proof_refinement_agent",
        "scicode_agent",
    }
)
"""Agents that send `responses_create_params` to the model unchanged, in every release that has them."""


@dataclass(frozen=True)
class KeyForwarding:
    """What a release's base classes do with a key in the body of `/run`; see `forkserver.forwarding`."""

    body: Literal["url", "indices"] | None = None
    """Which entries of the body put it into the URLs of model calls; `None`: none do."""
    switches: tuple[str, ...] = ()
    """Settings under which they do."""
    plain: bool = False
    """Whether they do for every agent, or only where the agent's request model keeps undeclared entries."""
    client: bool = False
    """Whether NeMo Gym's client adds the key by itself to calls made while `/run` is handled."""

    def reaches(self, agent: AgentCode) -> bool:
        """Whether an agent's model calls carry the key in their URL."""
        kept = self.plain or agent.entries
        return self.body is not None and kept and (agent.helpers or (self.client and agent.client))


def url_entries(by: Literal["url", "indices"], key: str) -> dict[str, str]:
    """Return the entries of a `/run` body that name its rollout.

    NeMo Gym makes `<task>-<rollout>` of indices; the suffix of an attempt (`-a0`) is not part of a key.
    """
    return {ROLLOUT_ID: key} if by == "url" else {TASK_INDEX: key, ROLLOUT_INDEX: "a0"}


def strategy_for(
    agent_type: str, forwarding: KeyForwarding, agent: AgentCode, *, own_urls: bool = False
) -> Strategy:
    """Return the strategy for an agent of this implementation, with this code, in a release that forwards keys like this.

    `own_urls`: its config has the policy's URL in place of a model server, and Gym adds no key to such a URL.
    """
    if own_urls:
        return "process"
    if agent_type in _CHOSEN:
        return _CHOSEN[agent_type]
    if agent.policy_url:
        return "body"
    if forwarding.body is not None and forwarding.reaches(agent):
        return forwarding.body
    return "metadata" if agent_type in _METADATA_KEPT else "process"


def refuse_unroutable(agent: str, agent_type: str, version: str) -> ConfigError:
    """Return the error for an agent of strategy `none`."""
    return ConfigError(
        f"the config of agent {agent!r} ({agent_type}, nemo-gym {version}) gives it a model of its own by a URL, so its "
        f"calls would not reach the policy; give it model_server: {{type: responses_api_models, name: {POLICY}}} or "
        f"the URL ${{policy_base_url}}"
    )


def routed_row(
    row: bytes, strategy: Strategy, *, key: str, base_url: str, metadata: Mapping[str, str]
) -> bytes:
    """Return the body for `/run` as JSON: the row with the entries that route it.

    Raises `DataError` for a row whose metadata has no room for the entry.
    """
    if strategy in BY_METADATA:
        body = _parsed(row)
        entries = dict.fromkeys(metadata, base_url) if strategy == "remote" else metadata
        body["responses_create_params"] = _with_metadata(body["responses_create_params"], entries)
        return codec.dumps(body)
    entries = url_entries("indices" if strategy == "indices" else "url", key)
    if strategy == "body":
        entries |= {"policy_base_url": base_url, "policy_api_key": key}
    if any(name.encode() in row for name in (ATTEMPT_INDEX, *entries)):
        return codec.dumps({**_parsed(row), **entries})
    return row[:-1] + b"," + codec.dumps(entries)[1:]


def _parsed(row: bytes) -> dict[str, Any]:
    """Return the row without the index that Gym would append to the key."""
    try:
        value: dict[str, Any] = codec.loads(row)
    except ValueError as error:
        raise DataError(f"row cannot be read as JSON: {error}") from None
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
            f"row has {len(merged) - len(entries)} metadata entries; the Responses API allows {MAX_METADATA}, and this agent "
            f"carries the rollout's key in {len(entries)} more: remove some"
        )
    return {**params, "metadata": merged}
