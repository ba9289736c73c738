"""Runs in NeMo Gym's interpreter: each config as Gym's own parser reads it, before anything is resolved.

Reads paths from stdin, one a line; the last line it writes is a JSON object of path -> config, or an error as a string.
"""

import json
import sys

from nemo_gym.global_config import GlobalConfigDictParser
from omegaconf import OmegaConf, open_dict

POLICY = "responses_api_models/openai_model/configs/openai_model.yaml"
VALUES = {"policy_base_url": "url", "policy_api_key": "key", "policy_model_name": "name"}


def parsed(path: str) -> object:
    parser = GlobalConfigDictParser()
    _, configs = parser.load_extra_config_paths([POLICY, path])
    merged = OmegaConf.merge(VALUES, *configs)
    parser._recursively_swap_keys(merged)
    if hasattr(parser, "compose_unbound_agent"):
        parser.compose_unbound_agent(merged)
    with open_dict(merged):
        for key in ("config_paths", "agent_map", *VALUES):
            merged.pop(key, None)
    return OmegaConf.to_container(merged, resolve=False)


def main() -> None:
    found = {}
    for path in sys.stdin.read().splitlines():
        try:
            found[path] = parsed(path)
        except Exception as error:
            found[path] = f"{type(error).__name__}: {error}"
    sys.__stdout__.write("\n" + json.dumps(found, default=str))


main()
