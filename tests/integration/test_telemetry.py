"""NeMo Gym's `telemetry` block reaches its servers."""

from __future__ import annotations

from pathlib import Path

import pytest

import gymgate
from gymgate.core.config import EnvironmentConfig
from support.stacks import call_then_answer, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm]


APP = """
import os
from typing import ClassVar
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)

class Response(BaseVerifyResponse):
    telemetry: dict[str, str]

class Mine(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> Response:
        telemetry = {name: value for name, value in os.environ.items() if "OTEL" in name}
        return Response(**body.model_dump(), reward=1.0, telemetry=telemetry)

if __name__ == "__main__":
    Mine.run_webserver()
"""
CONFIG = """
mine:
  resources_servers:
    mine: {entrypoint: app.py, domain: other}
mine_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: mine}
      model_server: {type: responses_api_models, name: policy_model}
telemetry: {service_name: mine, otlp_headers: "key=${oc.env:MINE_KEY}"}
"""


async def test_the_block_reaches_the_servers_in_gyms_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo Gym's own launcher would set these. A variable switches telemetry on here, so nothing is installed."""
    server = tmp_path / "resources_servers" / "mine"
    (server / "configs").mkdir(parents=True)
    (server / "app.py").write_text(APP)
    (server / "configs" / "mine.yaml").write_text(CONFIG)
    monkeypatch.setenv("NEMO_LENS_ENABLED", "1")
    monkeypatch.setenv("MINE_KEY", "k-123")
    environment = EnvironmentConfig(
        name=str(server / "configs" / "mine.yaml"), overrides={"telemetry.span_groups": "per_rollout"}
    )
    config = stack_config(environment, env_vars=("NEMO_LENS_ENABLED", "MINE_KEY"))
    row = {"responses_create_params": {"input": "hello"}}
    async with gymgate.acquire(config) as stack:
        policy = stack.register("p", call_then_answer, dialect="responses")
        told = [(await stack.run(row, policy=policy)).result for _ in range(2)]
    assert told[0] is not None
    variables = told[0]["telemetry"]
    assert told[1] is not None
    assert told[1]["telemetry"] == variables
    assert variables["NEMO_GYM_OTEL_ENABLED"] == "1"
    assert variables["NEMO_GYM_OTEL_SPAN_GROUPS"] == "per_rollout"
    assert variables["OTEL_SERVICE_NAME"] == "mine"
    assert len(variables["NEMO_GYM_OTEL_RUN_ID"]) == 12
    assert variables["OTEL_EXPORTER_OTLP_HEADERS"] == "key=k-123"
