"""`gymgate data prepare` gives the rows of NeMo Gym's own commands, run by `gymgate gym`, from the same hub."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gymgate.core.config import RuntimeConfig, cache_dir
from gymgate.gym.catalog import EnvConfig
from gymgate.gym.runtime import ensure_runtime, open_catalog
from support.hub import Hub, serving

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(600)]

OF_GYM, OF_GYMGATE = {"task_source"}, {"agent_ref"}
"""What either adds to a row to say where it goes."""


class Workspace:
    """An empty directory to run commands in, a hub that they download from, and a cache without data."""

    def __init__(self, directory: Path, hub: Hub) -> None:
        self.directory, self.hub = directory, hub
        (directory / "cache").mkdir()
        (directory / "cache" / "runtimes").symlink_to(cache_dir() / "runtimes")
        changed = {"HF_ENDPOINT": hub.url, "HF_HOME": str(directory / "hub")}
        changed |= {"GYMGATE_CACHE": str(directory / "cache"), "PYTHONPATH": str(directory)}
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | changed

    def gymgate(self, *arguments: str) -> None:
        self.run([sys.executable, "-m", "gymgate", *arguments])

    def run(self, command: Sequence[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]

    def rows(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / path).read_text().splitlines()]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    ensure_runtime(RuntimeConfig())
    with serving(Hub()) as hub:
        yield Workspace(tmp_path, hub)


def without(rows: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    assert all(names <= row.keys() for row in rows)
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def declared(config: EnvConfig) -> Iterator[dict[str, Any]]:
    """Each dataset of a config that comes from the hub, with its repository and file."""
    for instance in config.instances:
        for dataset in instance.block.get("datasets") or []:
            source = dataset.get("huggingface_identifier") or dataset.get("source")
            if source and dataset["type"] in ("train", "validation"):
                yield source | dataset  # whose `type` is the split


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("calendar", None),
        ("workplace_assistant", None),
        ("code_gen", None),  # its validation data is repeated
        ("structured_outputs", "structured_outputs_json"),
        ("mcqa", None),  # a split of a repository, not a file
        ("math_advanced_calculations", None),
    ],
)
def test_declared_data(workspace: Workspace, name: str, config: str | None) -> None:
    environment = open_catalog().find(name)
    chosen = next(each for each in environment.configs if config in (None, each.name))
    packaged = environment.data_file().path.read_bytes()
    datasets = list(declared(chosen))
    for dataset in datasets:
        files = workspace.hub.repositories.setdefault(dataset["repo_id"], {"README.md": b""})
        files[dataset.get("artifact_fpath") or f"{dataset['type']}.jsonl"] = packaged
    which = ["--config", str(chosen.path)] if config else ["--resources-server", name]
    collate = ["dataset", "collate", *which, "--mode", "train_preparation", "--output-dir", "gym"]
    workspace.gymgate("gym", "--", *collate, "--download", "+hf_token=any")
    workspace.gymgate("data", "prepare", name, *(["--config", config] if config else []), "-o", "ours")
    assert datasets
    for dataset in datasets:
        theirs = without(workspace.rows(f"gym/{dataset['type']}.jsonl"), OF_GYM)
        ours = without(workspace.rows(f"ours/{dataset['type']}.jsonl"), OF_GYMGATE)
        repeats = dataset.get("num_repeats", 1)  # gymgate's manifest has them
        assert theirs == [row for row in ours for _ in range(repeats)]


AIME = [{"id": i, "problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(1, 7)]
GPQA = (
    "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Subdomain,Record ID\n"
)


def test_scripts_of_benchmarks(workspace: Workspace) -> None:
    """aime24 and gpqa download what they make rows of; aegis_v4_safety makes them of files in the release."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(AIME), file)
    card = b"---\nconfigs:\n- config_name: gpqa_diamond\n  data_files: gpqa_diamond.csv\n---\n"
    csv = GPQA + "".join(f"Q{i}?,right,wrong a,wrong b,wrong c,Physics,rec{i}\n" for i in range(3))
    workspace.hub.repositories["HuggingFaceH4/aime_2024"] = {
        "README.md": b"",
        "data/train-00000-of-00001.parquet": file.getvalue(),
    }
    workspace.hub.repositories["Idavidrein/gpqa"] = {"README.md": card, "gpqa_diamond.csv": csv.encode()}
    site = ensure_runtime(RuntimeConfig()).site
    for name, written in (
        ("aime24", "aime24_benchmark"),
        ("gpqa", "gpqa_diamond_benchmark"),
        ("aegis_v4_safety", "aegis_v4_safety_benchmark"),
    ):
        # NeMo Gym's scripts write next to themselves: here to a copy, which PYTHONPATH puts first.
        shutil.copytree(site / "benchmarks" / name, workspace.directory / "benchmarks" / name)
        workspace.gymgate("gym", "--", "eval", "prepare", "--benchmark", name, "+hf_token=any")
        raw = f"benchmarks/{name}/data/{written}.jsonl"
        (chosen, *_) = open_catalog().find(f"benchmarks/{name}").configs
        (prompt,) = {
            dataset["prompt_config"]
            for instance in chosen.instances
            for dataset in instance.block.get("datasets") or []
            if dataset.get("prompt_config")
        }
        settings = (
            f"+input_jsonl_fpath={raw}",
            f"+prompt_config={prompt}",
            "+output_jsonl_fpath=filled.jsonl",
        )
        workspace.gymgate("gym", "--", "dataset", "render", *settings)
        workspace.gymgate("data", "prepare", f"benchmarks/{name}", "-o", f"ours/{name}")
        ours = without(workspace.rows(f"ours/{name}/benchmark.jsonl"), OF_GYMGATE)
        assert without(workspace.rows("filled.jsonl"), {"prompt_config_used"}) == ours
        assert ours


def test_a_generator(workspace: Workspace) -> None:
    generator = ["--task", "chain_sum", "--size", "7", "--seed", "3"]
    workspace.gymgate("data", "prepare", "reasoning_gym", "-o", "ours", "--", *generator)
    with_its_packages = max(
        (path for path in (cache_dir() / "runtimes").glob("nemo-gym-0.7.0-*") if _has(path, "reasoning_gym")),
        key=lambda path: path.stat().st_mtime,
    )
    script = "resources_servers/reasoning_gym/scripts/create_dataset.py"
    python, (site,) = (
        with_its_packages / "bin" / "python",
        with_its_packages.glob("lib/python*/site-packages"),
    )
    workspace.run([str(python), str(site / script), *generator, "--output", "theirs.jsonl"])
    assert workspace.rows("theirs.jsonl") == workspace.rows("ours/train.jsonl")


def _has(runtime: Path, package: str) -> bool:
    return any(runtime.glob(f"lib/python*/site-packages/{package}/__init__.py"))
