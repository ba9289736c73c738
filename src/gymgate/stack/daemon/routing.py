"""How a rollout's key reaches its model calls. Agents differ in what they forward.

url       `_ng_rollout_id` in the body of `/run` puts `/ng-rollout/<key>` before the path of every model call
metadata  an entry in `responses_create_params.metadata`, which the agent sends to the model unchanged
remote    the same entry with the base URL of the rollout's policy: the row goes to a service of the user
body      `policy_base_url` and `policy_api_key` in the body of `/run`
process   the agent cannot forward the key: each of its processes serves one rollout and has gateway ports of its own
none      its config sends its model calls past the gateway: its rows are refused

An environment server gets the key as the episode's `rollout_id`, and hands it on to its agents in their URLs.

`EnvironmentConfig.routing` decides, else a table of NeMo Gym's agents, else `url`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from packaging.version import Version

from gymgate.core import codec
from gymgate.core.config import POLICY, Routing
from gymgate.core.errors import ConfigError, DataError
from gymgate.rollouts.row import row_key
from gymgate.rollouts.row_fields import TASK_ID

Strategy = Routing | Literal["none"]

ROLLOUT_ID = "_ng_rollout_id"
ATTEMPT_INDEX = "_ng_attempt_index"
TASK_INDEX, TASK_SOURCE = "_ng_task_index", "task_source"
TASK_ID_FIELDS = ("task_id", "problem_id", "instance_id")
"""Fields with the id of a row's task, the first that is there."""
NO_TASK_FIELDS = frozenset({"agent_ref", TASK_SOURCE, "skills_ref"})
"""Fields of a row that are no part of its task. Those that begin with `_ng_` are none either."""
MAX_METADATA = 16
"""Entries that the Responses API allows."""

BY_METADATA: frozenset[Strategy] = frozenset({"metadata", "remote"})
_ROUTING: Mapping[str, Routing] = {
    "finance_agent": "metadata",
    "harbor_agent": "process",
    "harbor_agent_general": "process",
    "haystack_agent": "metadata",
    "labbench2_vlm_agent": "metadata",
    "langgraph_agent": "metadata",
    "mini_swe_agent": "body",
    "mini_swe_agent_2": "body",
    "remote_agent": "remote",
}
"""NeMo Gym's agents that forward the key otherwise than by URL."""
_ROUTING_UP_TO_0_6: Mapping[str, Routing] = {
    **_ROUTING,
    "anyswe_agent": "process",
    "critpt_agent": "metadata",
    "scicode_agent": "metadata",
    "swe_agents": "process",
    "verifiers_agent": "process",
}


def strategy_for(agent_type: str, version: str, *, own_urls: bool = False) -> Routing:
    """Return the strategy for an agent of this implementation in a release of nemo-gym.

    `own_urls`: its config has the policy's URL in place of a model server, and Gym adds no key to such a URL.
    """
    if own_urls:
        return "process"
    table = _ROUTING if Version(version) >= Version("0.7.dev0") else _ROUTING_UP_TO_0_6
    return table.get(agent_type, "url")


def episode_error(server: str, agent: str, agent_type: str, strategy: Strategy) -> ConfigError:
    """Return the error for an agent behind an environment server that the rollout's key reaches by its URL only."""
    return ConfigError(
        f"environment server {server!r} cannot call agent {agent!r} ({agent_type}): it forwards the rollout's key by "
        f"{strategy!r}, and an environment server passes it on in the URL only"
    )


def unroutable_error(agent: str, agent_type: str, version: str) -> ConfigError:
    """Return the error for an agent of strategy `none`."""
    return ConfigError(
        f"the config of agent {agent!r} ({agent_type}, nemo-gym {version}) gives it its own model by a URL, so its "
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
        body = _parse(row)
        entries = dict.fromkeys(metadata, base_url) if strategy == "remote" else metadata
        body["responses_create_params"] = _with_metadata(body["responses_create_params"], entries)
        return codec.dumps(body)
    entries = {ROLLOUT_ID: key}
    if strategy == "body":
        entries |= {"policy_base_url": base_url, "policy_api_key": key}
    if any(name.encode() in row for name in (ATTEMPT_INDEX, *entries)):
        return codec.dumps({**_parse(row), **entries})
    return row[:-1] + b"," + codec.dumps(entries)[1:]


def episode_request(row: bytes, *, key: str, taskset: str) -> bytes:
    """Return the body for `/run` of an environment server as JSON: the episode and its task, as NeMo Gym makes it of a row.

    `taskset` is that of rows which name none. The task's id is all in the row, so that every caller that sends the row gets
    the same one: the id that NeMo Gym gave it, else a field, else the task's number in `_ng_task_index`, else the key of its
    content. Not its line in a file, which moves.
    """
    fields = _parse(row)
    task = fields.get(TASK_ID)
    if not (isinstance(task, dict) and task.get("taskset") and task.get("task_id")):
        ids = (fields[name] for name in TASK_ID_FIELDS if fields.get(name) is not None)
        index = fields.get(TASK_INDEX)
        is_index = isinstance(index, int) and not isinstance(index, bool) and index >= 0
        identity = next(ids, index if is_index else row_key(fields))
        task = {"taskset": str(fields.get(TASK_SOURCE) or taskset), "task_id": str(identity)}
    task_input = {
        name: value
        for name, value in fields.items()
        if name not in NO_TASK_FIELDS and not name.startswith("_ng_")
    }
    episode = {"rollout_id": key, "attempt": 0}
    return codec.dumps({"episode_id": episode, "task": {"task_id": task, "task_input": task_input}})


def _parse(row: bytes) -> dict[str, Any]:
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
