"""An environment's config, resolved by NeMo Gym's own parser. Imports nothing of ours; parsing changes NeMo Gym's globals."""

from __future__ import annotations

import importlib
import re
import traceback
from typing import Any

INSTANCE_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
NOWHERE = "http://127.0.0.1:1/v1"
DEFAULT_MODEL = "responses_api_models/openai_model/configs/openai_model.yaml"
STAND_IN_MODEL = {
    "entrypoint": "app.py",
    "openai_base_url": "http://127.0.0.1:1/v1",
    "openai_api_key": "gymgate",
    "openai_model": "model",
}


def parsed(order: dict[str, Any]) -> dict[str, Any]:
    """`{"config": {...}, "urls": [...]}`, or `{"missing": [keys that the user must give]}`, or `{"error": message}`.

    `urls` are the placeholders for a model's URL that a server uses by itself, outside of a model server's block.
    """
    gym: Any = importlib.import_module("nemo_gym.global_config")
    OmegaConf: Any = importlib.import_module("omegaconf").OmegaConf
    parser = gym.GlobalConfigDictParser()
    initial = OmegaConf.create(order["initial"])
    for key, value in order["overrides"]:
        OmegaConf.update(initial, key, value, force_add=True)
    paths = order["config_paths"]
    try:
        merged = OmegaConf.merge(*parser.load_extra_config_paths(list(paths))[1], initial)
        if "policy_model" not in merged:
            paths = [*paths, DEFAULT_MODEL]
            merged = OmegaConf.merge(*parser.load_extra_config_paths(list(paths))[1], initial)
        plain = OmegaConf.to_container(merged, resolve=False)
        for name in undefined_models(plain):
            initial[name] = {"responses_api_models": {"openai_model": dict(STAND_IN_MODEL)}}
        wanted = unset(plain)
        for key, value in wanted["models"].items():
            OmegaConf.update(initial, key, value, force_add=True)
        if wanted["others"]:
            return {"missing": wanted["others"]}
        initial.config_paths = paths
        try:
            config = gyms_parse(gym, initial)
        except Exception as error:
            if type(error).__name__ != "AlmostServerError":
                raise
            traceback.print_exc()  # once more without datasets, which are ours to read and need not be valid
            for key in dataset_lists(plain):
                OmegaConf.update(initial, key, [], force_add=True)
            config = gyms_parse(gym, initial)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    resolved = OmegaConf.to_container(config, resolve=False)
    return {"config": resolved, "urls": direct_urls(resolved)}


def unset(merged: dict[str, Any]) -> dict[str, Any]:
    """Keys that are interpolated but not set: those of model servers, which the gateway stands in for, get a
    placeholder; the others are the user's to give."""
    models: dict[str, str] = {}
    others: set[str] = set()
    for name, block in merged.items():
        if not isinstance(block, dict):
            continue
        for kind in INSTANCE_KINDS:
            names = {key for key in interpolated(block.get(kind)) if key not in merged}
            if kind == "responses_api_models":
                models.update({key: placeholder(key) for key in names})
                models.update({f"{name}.{path}": placeholder(path) for path in blanks(block, kind)})
            else:
                others.update(names)
    return {"models": models, "others": sorted(others - set(models))}


def gyms_parse(gym: Any, initial: Any) -> Any:
    """What Gym's parser makes of an initial config."""
    return gym.GlobalConfigDictParser().parse(
        gym.GlobalConfigDictParserConfig(
            initial_global_config_dict=initial, skip_load_from_cli=True, skip_load_from_dotenv=True
        )
    )


def dataset_lists(merged: dict[str, Any]) -> list[str]:
    """Dotted paths of the datasets that agents declare."""
    return [
        f"{name}.responses_api_agents.{type_}.datasets"
        for name, block in merged.items()
        if isinstance(block, dict)
        for type_, settings in (block.get("responses_api_agents") or {}).items()
        if isinstance(settings, dict) and "datasets" in settings
    ]


def undefined_models(merged: dict[str, Any]) -> list[str]:
    """Model servers that servers refer to and no file defines: the gateway stands in for them like for any other."""
    return sorted({name for name in model_references(merged) if name != "???" and name not in merged})


def model_references(node: Any) -> list[str]:
    """Names in every `{"type": "responses_api_models", "name": instance}` below `node`."""
    if isinstance(node, dict):
        own = [node["name"]] if node.get("type") == "responses_api_models" and "name" in node else []
        names = [name for name in own if isinstance(name, str) and "${" not in name]
        return names + [name for child in node.values() for name in model_references(child)]
    return [name for child in node for name in model_references(child)] if isinstance(node, list) else []


def direct_urls(config: dict[str, Any]) -> list[str]:
    """Keys with a placeholder URL that servers other than model servers interpolate."""
    blocks = [block for block in config.values() if isinstance(block, dict)]
    used = {key for block in blocks for kind in INSTANCE_KINDS[:2] for key in interpolated(block.get(kind))}
    return sorted(key for key in used if config.get(key) == NOWHERE)


def interpolated(node: Any) -> set[str]:
    """Top-level keys that the strings below `node` interpolate as `${key}`."""
    if isinstance(node, str):
        return set(re.findall(r"\$\{([A-Za-z_]\w*)\}", node))
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return {key for child in children for key in interpolated(child)}


def blanks(node: Any, only: str = "") -> list[str]:
    """Dotted paths of the `???` below `node` (below its key `only`, if given)."""
    if node == "???":
        return [""]
    if not isinstance(node, dict):
        return []
    items = [(key, child) for key, child in node.items() if not only or key == only]
    return [f"{key}.{path}".rstrip(".") for key, child in items for path in blanks(child)]


def placeholder(key: str) -> str:
    return NOWHERE if key.endswith("url") else "gymgate"
