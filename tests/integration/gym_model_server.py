"""What a release's own vLLM model server makes of an endpoint's answers: runs in NeMo Gym's interpreter.

Reads chat choices as JSON from stdin; writes for each the Responses object that the server answered with, or `null` for HTTP 500.
The settings are those of its `configs/vllm_model.yaml`; in place of its client of the endpoint there is a script.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import MagicMock, patch

import nemo_gym.server_utils
from fastapi.testclient import TestClient
from nemo_gym.server_utils import ServerClient
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig


class Endpoint:
    """The endpoint that the server asks."""

    choice: dict[str, Any]

    async def create_chat_completion(self, **body: Any) -> dict[str, Any]:
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [self.choice],
        }


def main() -> None:
    config = VLLMModelConfig(
        host="127.0.0.1",
        port=1,
        base_url="http://127.0.0.1:1/v1",
        api_key="none",
        model="m",
        entrypoint="",
        name="",
        return_token_id_information=False,
        uses_reasoning_parser=True,
        uses_interleaved_reasoning=True,
    )
    endpoint, answers = Endpoint(), []
    with (
        patch.object(nemo_gym.server_utils, "get_global_config_dict", dict),
        patch.object(VLLMModel, "_resolve_client", lambda self, request: endpoint),
    ):
        server = VLLMModel(config=config, server_client=MagicMock(spec=ServerClient, global_config_dict={}))
        client = TestClient(server.setup_webserver(), raise_server_exceptions=False)
        for choice in json.load(sys.stdin):
            endpoint.choice = choice
            answer = client.post("/v1/responses", json={"input": "hi"})
            answers.append(answer.json() if answer.is_success else None)
    sys.__stdout__.write(json.dumps(answers))


if __name__ == "__main__":
    main()
