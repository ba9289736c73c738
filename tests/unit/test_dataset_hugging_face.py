"""Hugging Face datasets that lie on this disk, read by the real library in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

SCRIPT = """
import json, sys
import datasets
from pathlib import Path
from gymgate.gym.row_sources import open_rows
from gymgate.core.errors import GymgateError
here = Path(sys.argv[1])
rows = [
    {"responses_create_params": {"input": [{"role": "user", "content": "a"}], "tools": [{"name": "t"}]}, "agent_ref": None},
    {"responses_create_params": {"input": [{"role": "user", "content": "b", "id": "1"}]}, "agent_ref": {"name": "g"}},
]
texts = [{**row, "responses_create_params": json.dumps(row["responses_create_params"])} for row in rows]
long = {**rows[0], "responses_create_params": json.dumps({"input": "a", "seed": 2**70})}
datasets.Dataset.from_list([long]).save_to_disk(here / "long")
one = datasets.Dataset.from_list(rows)
one.save_to_disk(here / "one")
(here / "one" / "notes.jsonl").touch()
datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(here / "two")
datasets.DatasetDict({"a": one, "b": one}).save_to_disk(here / "three")
datasets.Dataset.from_list(texts).save_to_disk(here / "texts")
(here / "files").mkdir()
(here / "files" / "rows.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
report = {}
for name in ("one", "two", "two:test", "texts", "files", "three", "three:c", "one:train", "gone"):
    try:
        found = open_rows(f"hf:{here}/{name}", environment=None)
        report[name] = [len(found), [[r.line, r.agent, r.data] for r in found], found[-1].data, found[0].key]
    except GymgateError as error:
        report[name] = str(error)
report["long"] = open_rows(f"hf:{here}/long", environment=None)[0].data["responses_create_params"]["seed"]
report["plain"] = len(open_rows(str(here / "one"), environment=None))
print(json.dumps(report))
"""


def test_saved_datasets_and_directories_of_files(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    first = {"input": [{"role": "user", "content": "a"}], "tools": [{"name": "t"}]}
    second = {"input": [{"role": "user", "content": "b", "id": "1"}]}
    for name in ("one", "two", "texts", "files"):
        count, rows, last, _ = report[name]
        assert count == 2
        assert [(line, agent) for line, agent, _ in rows] == [(1, None), (2, "g")]
        assert [data["responses_create_params"] for _, _, data in rows] == [first, second]
        assert last["responses_create_params"] == second
    assert report["one"][3] == report["two"][3]
    assert report["two:test"][0] == 1
    assert report["plain"] == 2
    assert report["long"] == 2**70
    assert ": :a, :b" in report["three"]
    assert "no split 'c'" in report["three:c"]
    assert "no splits" in report["one:train"]
    assert "cannot load" in report["gone"]
    assert all("\n" not in value for value in report.values() if isinstance(value, str))
