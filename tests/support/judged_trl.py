"""An environment whose judges are the policy, one under the policy's name and one under its own."""

from __future__ import annotations

import json
from pathlib import Path

SERVER = """
from typing import ClassVar
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)
from nemo_gym.config_types import ModelServerRef
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import get_response_json

class Config(BaseResourcesServerConfig):
    judge: ModelServerRef
    critic: ModelServerRef

class Judged(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: Config

    async def verdict(self, judge: str, text: str) -> float:
        answer = await self.server_client.post(server_name=judge, url_path="/v1/responses", json={
            "input": "judge " + text, "temperature": 0.25, "max_output_tokens": 90})
        said = NeMoGymResponse.model_validate(await get_response_json(answer)).output_text
        return said.count("y") / (len(said) or 1)

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        judges = (self.config.judge, self.config.critic)
        scores = [await self.verdict(judge.name, body.response.output_text) for judge in judges]
        return BaseVerifyResponse(**body.model_dump(), reward=sum(scores) / 2)

if __name__ == "__main__":
    Judged.run_webserver()
"""
CONFIG = """
judged:
  resources_servers:
    judged:
      entrypoint: app.py
      domain: other
      verified: false
      description: a server that asks the policy, under its own name and under another
      judge: {type: responses_api_models, name: policy_model}
      critic: {type: responses_api_models, name: critic_model}
critic_model:
  responses_api_models:
    openai_model:
      entrypoint: app.py
      openai_base_url: ???
      openai_api_key: ???
      openai_model: ???
judged_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: judged}
      model_server: {type: responses_api_models, name: policy_model}
"""


def judged(folder: Path) -> tuple[str, str]:
    """The paths of the environment's config and of its rows."""
    server = folder / "resources_servers/judged"
    (server / "configs").mkdir(parents=True)
    (server / "app.py").write_text(SERVER)
    (server / "configs/judged.yaml").write_text(CONFIG)
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"responses_create_params": {"input": "say a letter"}}))
    return str(server / "configs/judged.yaml"), str(rows)
