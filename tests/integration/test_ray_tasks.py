"""Ray tasks of NeMo Gym's servers know their rollout in Ray's workers; a real Ray in NeMo Gym's interpreter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gymgate.config import RuntimeConfig
from gymgate.runtime import ensure_runtime
from gymgate.stack import forkserver

pytestmark = [pytest.mark.gym, pytest.mark.timeout(300)]

KEYS = {name: name * 32 for name in "ab"}
PROGRAM = """
import importlib, json, sys
import nemo_gym.rollout_correlation as correlation
sys.path.insert(0, sys.argv[1])
importlib.import_module("forkserver.labelling").label_containers_of_tasks("label")
import ray

@ray.remote(max_retries=0)
def inner(value):
    return [correlation.current_rollout_id(), value]

@ray.remote(max_retries=0)
def outer(value, url=None):
    labels = importlib.import_module("nemo_gym.sandbox.providers.registry").get_provider_class("docker")
    known = correlation.current_rollout_id()
    return [known, value, getattr(labels, "labels_rollouts", False), ray.get(inner.remote(value))]

@ray.remote(max_retries=0)
def counting(count):
    for number in range(count):
        yield number

@ray.remote(max_retries=0)
def without_gym():
    return "ran"

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
found = {"unknown": ray.get(inner.remote(1))}
with correlation.rollout_context(sys.argv[2]):
    found["of a request"] = ray.get(outer.remote(ray.put(2)))
found["by a URL"] = ray.get(outer.remote(3, url=f"http://127.0.0.1:1/ng-rollout/{sys.argv[3]}/v1"))
found["options"] = ray.get(outer.options(num_cpus=1).remote(value=4))[:3]
found["generator"] = [ray.get(each) for each in counting.remote(3)]
hidden = {"env_vars": {"PYTHONPATH": sys.argv[4]}}  # where nemo_gym.sandbox cannot be imported
found["without sandboxes"] = ray.get(without_gym.options(runtime_env=hidden).remote())
print(json.dumps(found))
"""


def test_tasks_know_their_rollout_and_work_as_ever(tmp_path: Path) -> None:
    package = tmp_path / "hidden" / "nemo_gym"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (program := tmp_path / "program.py").write_text(PROGRAM)
    source = Path(forkserver.__file__).parents[1]
    python = ensure_runtime(RuntimeConfig(version="0.7.0")).python
    command = [str(word) for word in (python, program, source, KEYS["a"], KEYS["b"], package.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "unknown": [None, 1],
        "of a request": [KEYS["a"], 2, True, [None, 2]],
        "by a URL": [KEYS["b"], 3, True, [None, 3]],
        "options": [None, 4, True],
        "generator": [0, 1, 2],
        "without sandboxes": "ran",
    }
