"""Trajectories of `gymgate export --to atif`, read by NeMo Gym's own reader, with a failed rollout among them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from gymgate.cli.export import command
from gymgate.gym.runtime import clean_env, ensure_runtime
from support.stacks import runtime

pytestmark = [pytest.mark.gym, pytest.mark.warm]

EARLIER = Path(__file__).parents[1] / "unit" / "earlier_run"
SCRIPT = """
import json, sys
from pathlib import Path
from nemo_gym.atif_json import strict_json_loads
from nemo_gym.atif_reverification import index_materialized_inputs, load_atif_manifest, project_atif_manifest_entries
from nemo_gym.atif_v1_7 import AtifTrajectoryV1_7
directory, inputs = Path(sys.argv[1]), Path(sys.argv[2])
read = {path.name: AtifTrajectoryV1_7.model_validate(strict_json_loads(path.read_bytes())) for path in directory.glob("*.json")}
rows = index_materialized_inputs(json.loads(line) for line in inputs.open())
entries = load_atif_manifest(directory / "manifest.jsonl")
projected = project_atif_manifest_entries(entries, rows, manifest_directory=directory)
answers = [{
    "input": each.payload["responses_create_params"]["input"],
    "output": each.payload["response"]["output"],
    "usage": each.payload["response"]["usage"],
} for each in projected]
failed = [[step.source for step in t.steps] for t in read.values() if t.extra["gymgate"]["outcome"] == "failed"]
print("READ", json.dumps({"trajectories": len(read), "failed": failed, "answers": answers}))
"""


def test_gyms_reader_takes_them_for_the_responses_that_were_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of five rows, one of which no agent could take, with the inputs that `--to gym` writes."""
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)  # its rows are named by a relative path
    for form, output in (("atif", "atif"), ("gym", "gym.jsonl")):
        done = CliRunner().invoke(command, ["run", "--to", form, "-o", output], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    python = ensure_runtime(runtime()).python
    ran = subprocess.run(
        [str(python), "-c", SCRIPT, "atif", "gym_materialized_inputs.jsonl"],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    read = orjson.loads(ran.stdout.partition("READ ")[2])
    assert (read["trajectories"], len(read["answers"])) == (5, 4)
    assert read["failed"] == [["system", "user"]]
    rollouts = [orjson.loads(each) for each in Path("gym.jsonl").read_bytes().splitlines()]
    assert [(answer["usage"] or {}).get("output_tokens") for answer in read["answers"][:2]] == [
        30,
        None,
    ]  # as recorded
    for answer, rollout in zip(read["answers"], rollouts, strict=True):
        response = rollout["response"]
        given = rollout["responses_create_params"]["input"]
        assert [item["content"] for item in answer["input"]] == [item["content"] for item in given]
        assert [content_of(item) for item in answer["output"]] == list(map(content_of, response["output"]))


def content_of(item: dict[str, Any]) -> tuple[Any, ...]:
    """An item without what is made anew: its id, and the white space of arguments."""
    arguments = orjson.loads(item["arguments"]) if "arguments" in item else None
    text = [part["text"] for part in item.get("content") or ()]
    return item["type"], item.get("call_id"), item.get("name"), arguments, item.get("output"), text
