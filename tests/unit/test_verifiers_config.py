"""The configs that ship beside the environment, read by verifiers itself, or as prime-rl reads them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import orjson
import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

CONFIGS = Path(__file__).parents[2] / "environments/nemo_gym_env/configs"
CONFIG = CONFIGS / "eval.toml"
MAIN = "from verifiers.v1.cli.eval.main import main; main()"


def test_the_shipped_eval_config_is_resolved(tmp_path: Path) -> None:
    options = ["-m", "m", "--dry-run", "--no-rich", "-o", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "@", str(CONFIG), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [resolved] = tmp_path.glob("*/configs/resolved/eval.json")
    config = orjson.loads(resolved.read_bytes())
    taskset = config["env"]["taskset"]
    assert (taskset["id"], taskset["env"], taskset["max_calls"]) == (
        "nemo_gym_env",
        "workplace_assistant",
        24,
    )
    assert (config["num_rollouts"], config["select"]["limit"], config["push"]) == (4, 5, False)


def sources(file: str, *blocks: str) -> list[dict[str, Any]]:
    """The sources in a config of prime-rl's."""
    config = tomllib.loads((CONFIGS / file).read_text())
    found: list[dict[str, Any]] = []
    for block in blocks:
        part: Any = config
        for name in block.split("."):
            part = part[name]
        found += part
    return found


@pytest.mark.parametrize(
    "source",
    [
        *sources("prime_rl.toml", "orchestrator.train.source", "orchestrator.eval.source"),
        *sources("prime_rl_evals.toml", "eval.source"),
    ],
    ids=lambda source: source["name"],
)
def test_a_source_of_prime_rl_is_this_environment(source: dict[str, Any]) -> None:
    """prime-rl 0.8 (`EnvConfig`) resolves `env` with this function, and sends it to the env server in this form."""
    from verifiers.v1.serve import env_config_data

    from gymgate.integrations.verifiers.harness import NeMoGymEnv
    from gymgate.integrations.verifiers.taskset import NeMoGymConfig

    resolved = vf.resolve_env_field({"env": source["env"]})["env"]
    assert resolved.env_id
    assert isinstance(resolved.taskset, NeMoGymConfig)
    assert resolved.taskset.env == source["env"]["taskset"]["env"]
    assert resolved.taskset.share == "machine"  # its env servers have several workers
    sent = vf.resolve_env_field({"env": env_config_data(resolved)})["env"]
    assert sent.taskset == resolved.taskset
    assert isinstance(vf.load_environment(sent), NeMoGymEnv)
