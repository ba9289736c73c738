"""How the installed release's base classes forward a rollout's key to its model calls. Imports nothing of gymgate.

Releases differ in which entries of a `/run` body name the rollout, and in which settings put that name into URLs. So the
base agent and the client of this release get a body with a key, and the URLs that they make are checked for it.
"""

from __future__ import annotations

import asyncio
import importlib
import traceback
from types import SimpleNamespace
from typing import Any

MODEL_PATH = "/v1/responses"
_MODEL = "model"


def key_forwarding(order: dict[str, Any]) -> dict[str, Any]:
    """Return what this release does with each of `order["bodies"]` under the settings in `order["switches"]`, usual ones first.

    `body`: the name of the first body whose key appears in URLs under the usual settings, or `None`. `switches`: all
    settings under which it does. `plain`: whether it does if an agent's request model declares no entries of its own.
    `client`: whether the client adds the key by itself to model calls made while `/run` is handled.
    """
    usual = next(iter(order["switches"].values()))
    for name, body in order["bodies"].items():
        if _in_url(order, usual, body):
            return {
                "body": name,
                "switches": [each for each, on in order["switches"].items() if _in_url(order, on, body)],
                "plain": _in_url(order, usual, body, plain=True),
                "client": _in_clients_url(order, usual),
            }
    return {"body": None, "switches": [], "plain": False, "client": False}


def _in_url(
    order: dict[str, Any], settings: dict[str, Any], entries: dict[str, str], *, plain: bool = False
) -> bool:
    """Whether the base agent puts the key of a body with these entries before the path of a model call."""
    agents: Any = importlib.import_module("nemo_gym.base_responses_api_agent")
    resources: Any = importlib.import_module("nemo_gym.base_resources_server")
    if not hasattr(agents.SimpleResponsesAPIAgent, "url_path_for_run"):
        return False

    class Lenient(resources.BaseRunRequest, extra="allow"):  # type: ignore[misc,call-arg]
        pass

    class Agent(agents.SimpleResponsesAPIAgent):  # type: ignore[misc]
        async def responses(self) -> None: ...

        async def run(self) -> None: ...

    try:
        model = resources.BaseRunRequest if plain else Lenient
        body = model.model_validate({"responses_create_params": {"input": ""}, **entries})
        agent = Agent.model_construct(
            config=agents.BaseResponsesAPIAgentConfig.model_construct(),
            server_client=SimpleNamespace(global_config_dict=settings),
        )
        return _names(order["key"], agent.url_path_for_run(MODEL_PATH, body))
    except Exception:
        traceback.print_exc()
        return False


def _in_clients_url(order: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether the client puts the key of the rollout that is being run before the path of a model call."""
    utils: Any = importlib.import_module("nemo_gym.server_utils")
    OmegaConf: Any = importlib.import_module("omegaconf").OmegaConf
    urls: list[str] = []

    async def note(*_: Any, url: str, **__: Any) -> None:
        urls.append(url)

    server = {"responses_api_models": {_MODEL: {"host": "127.0.0.1", "port": 1}}}
    try:
        correlation: Any = importlib.import_module("nemo_gym.rollout_correlation")
        client = utils.ServerClient.model_construct(
            head_server_config=None, global_config_dict=OmegaConf.create({**settings, _MODEL: server})
        )
        sent, utils.request = utils.request, note
        try:
            with correlation.rollout_context(order["key"]):
                asyncio.run(client.request(_MODEL, MODEL_PATH, "POST", json={}))
        finally:
            utils.request = sent
    except Exception:
        traceback.print_exc()
        return False
    return bool(urls) and _names(order["key"], urls[0].partition(":1")[2])


def _names(key: str, path: str) -> bool:
    """Whether a path begins with the key where the gateway looks for it."""
    segments = path.split("/")
    return segments[1:2] == ["ng-rollout"] and segments[2].partition("-")[0] == key
