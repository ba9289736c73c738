"""An environment of a user's own by path: settings, files of settings and variables reach its server, by every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymgate.gym.row_sources import open_rows
from support.upstream import scripted_chat

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(300)]

APP = """
import os
from typing import ClassVar
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)

class Config(BaseResourcesServerConfig):
    worth: float = 0.0
    steps: list[dict[str, float]] = []
    key: str = ""

class Mine(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: Config

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        steps = sum(step["value"] for step in self.config.steps)
        known = 0.25 if self.config.key == "k-123" == os.environ.get("MINE_KEY") else 0.0
        return BaseVerifyResponse(**body.model_dump(), reward=self.config.worth + steps + known)

if __name__ == "__main__":
    Mine.run_webserver()
"""
CONFIG = """
mine:
  resources_servers:
    mine:
      entrypoint: app.py
      domain: other
      key: ${oc.env:MINE_KEY,""}
mine_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: mine}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
      - {name: example, type: example, jsonl_fpath: resources_servers/mine/data/example.jsonl}
      - name: train
        type: train
        jsonl_fpath: resources_servers/mine/data/train.jsonl
        prepare_script: resources_servers/mine/prepare.py
        license: MIT
"""
PREPARE = """
import json
from pathlib import Path
from resources_servers.mine.questions import QUESTIONS

def prepare(repeat: int = 1) -> Path:
    path = Path(__file__).parent / "data" / "train.jsonl"
    rows = [{"responses_create_params": {"input": text}} for text in QUESTIONS * repeat]
    path.write_text("".join(json.dumps(row) + "\\n" for row in rows))
    return path
"""
SERVER = "mine.resources_servers.mine"
SAID = "hello"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The config of an environment in a repository of its own."""
    home = tmp_path / "repository" / "resources_servers" / "mine"
    (home / "configs").mkdir(parents=True)
    (home / "data").mkdir()
    (home / "app.py").write_text(APP)
    (home / "configs" / "mine.yaml").write_text(CONFIG)
    (home / "prepare.py").write_text(PREPARE)
    (home / "questions.py").write_text('QUESTIONS = ["say hello", "say it again"]\n')
    row = {"responses_create_params": {"input": [{"role": "user", "content": "say hello"}]}}
    (home / "data" / "example.jsonl").write_text(json.dumps(row) + "\n")
    content = {"type": "output_text", "text": SAID, "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [content]}
    response = {
        "id": "r", "object": "response", "created_at": 0, "model": "m", "output": [message],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    record = {**row, "response": response, "reward": 1.0}
    (home / "data" / "example_rollouts.jsonl").write_text(json.dumps(record) + "\n")
    return home / "configs" / "mine.yaml"


def gymgate(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gymgate", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, **environment}
    )


def rewards(path: Path) -> list[Any]:
    return [json.loads(line)["reward"] for line in path.read_text().splitlines()]


def test_settings_and_variables_reach_the_server_by_every_command(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text(
        "mine: {resources_servers: {mine: {steps: [{value: 0.125}, {value: 0.125}]}}}\n"
    )
    settings = ("--set", f"{SERVER}.worth=0.5", "--set", f"@{tmp_path}/over.yaml", "--env-var", "MINE_KEY")
    key = {"MINE_KEY": "k-123"}
    with scripted_chat(lambda _: SAID) as url:
        done = gymgate("run", mine, "-b", url, "-m", "m", "-o", tmp_path / "collected", *settings, **key)
        assert done.returncode == 0, done.stderr
    (written,) = [*(tmp_path / "collected").rglob("rollouts*.jsonl")]
    assert rewards(written) == [1.0]
    done = gymgate("check", mine, *settings, **key)
    assert (done.returncode, "mine: match 1/1" in done.stdout) == (0, True), done.stdout + done.stderr
    done = gymgate("check", mine, *settings[:-2], **key)
    assert "mine: differs 0/1" in done.stdout, "the variable is not named, so the server does not see it"


@pytest.mark.heavy
def test_verifiers_own_command_takes_the_same(mine: Path, tmp_path: Path) -> None:
    overrides = {f"{SERVER}.worth": 0.5, f"{SERVER}.steps": [{"value": 0.25}]}
    done = gymgate(
        "eval", "run", "nemo-gym-env", "--env.taskset.env", mine, "--env.taskset.overrides", json.dumps(overrides),
        "--env.taskset.env-vars", '["MINE_KEY"]', "-r", "1", "-n", "1",
        "--output-dir", tmp_path / "run", MINE_KEY="k-123",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1.000" in done.stdout + done.stderr, done.stdout


def test_its_own_preparation_is_run_beside_it(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = gymgate(
        "data",
        "prepare",
        mine,
        "--arg",
        "repeat=2",
        "-o",
        out,
        GYMGATE_CACHE=os.environ.get("GYMGATE_CACHE", ""),
    )
    assert done.returncode == 0, done.stderr
    rows = list(open_rows(str(out / "train.jsonl"), environment=None))
    assert [row.agent for row in rows] == ["mine_agent"] * 4


def test_the_example_is_checked_by_its_recordings() -> None:
    example = (
        Path(__file__).parents[2] / "examples" / "own_environment" / "resources_servers" / "letter_share"
    )
    done = gymgate("check", example / "configs" / "letter_share.yaml")
    assert (done.returncode, "letter_share: match 5/5" in done.stdout) == (0, True), done.stdout + done.stderr
