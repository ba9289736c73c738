"""How a rollout's key reaches its model calls, agent by agent, since agents and releases differ in what they hand on.

url       `_ng_rollout_id` in the body of `/run` puts `/ng-rollout/<key>` before the path of every model call
indices   `_ng_task_index` and `_ng_rollout_index` do the same, in releases that know no `_ng_rollout_id`
metadata  an entry in `responses_create_params.metadata`, which the agent sends to the model unchanged
remote    the same entry, in place of the key the base URL of the rollout's policy: the row goes to a service of the user's
body      `policy_base_url` and `policy_api_key` in the body of `/run`
process   the agent cannot forward the key: each of its processes serves one rollout and has gateway ports of its own
none      its config sends its model calls elsewhere than to the gateway: its rows are refused

Which of them an agent takes is found out from the installed release: its base classes are asked (`Handing`), the agent's code
is read (`AgentCode`). Nothing goes by a version number.
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
    "labbench2_vlm_agent": "metadata",  # makes its body anew, and 0.7 leaves the rollout's id out of that
    "remote_agent": "remote",
}
"""Agents whose code does not show how to route them."""
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
"""Agents that send `responses_create_params` to the model as it came, in every release that has them."""


@dataclass(frozen=True)
class Handing:
    """What a release's base classes do with a key in the body of `/run`; see `forkserver.handing`."""

    body: Literal["url", "indices"] | None = None
    """Which entries of the body bring it into the URLs of model calls; `None`: none do."""
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
    """Entries of a `/run` body that name its rollout. Of indices NeMo Gym makes `<task>-<rollout>`, and an attempt's suffix
    (`-a0`) is no part of a key."""
    return {ROLLOUT_ID: key} if by == "url" else {TASK_INDEX: key, ROLLOUT_INDEX: "a0"}


def strategy_for(agent_type: str, handing: Handing, agent: AgentCode, *, own_urls: bool = False) -> Strategy:
    """How to route an agent of this implementation, with this code, in a release that hands keys on like this.

    `own_urls`: it is configured with the policy's URL in place of a model server, to which Gym adds no key.
    """
    if own_urls:
        return "process"
    if agent_type in _CHOSEN:
        return _CHOSEN[agent_type]
    if agent.policy_url:
        return "body"
    if handing.body is not None and handing.reaches(agent):
        return handing.body
    return "metadata" if agent_type in _METADATA_KEPT else "process"


def refuse_unroutable(agent: str, agent_type: str, version: str) -> ConfigError:
    """The error for an agent of strategy `none`."""
    return ConfigError(
        f"agent {agent!r} ({agent_type}, nemo-gym {version}) is given a model of its own by a URL in its config, so its "
        f"calls would not reach the policy; give it model_server: {{type: responses_api_models, name: {POLICY}}} or "
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
    entries = url_entries("indices" if strategy == "indices" else "url", key)
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
