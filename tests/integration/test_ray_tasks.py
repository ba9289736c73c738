"""Ray tasks of NeMo Gym's servers know their rollout in Ray's workers; a real Ray in NeMo Gym's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gymgate.core.config import RuntimeConfig
from gymgate.gym import inside
from gymgate.gym.inside.forkserver import rollout_label
from gymgate.gym.runtime import ensure_runtime

pytestmark = [pytest.mark.gym, pytest.mark.timeout(300)]

STACK = ["nemo-gym.sandbox=1", "stack=s"]
KEYS = {name: name * 32 for name in "ab"}
PROGRAM = """
import asyncio, importlib, json, subprocess, sys
import nemo_gym.rollout_correlation as correlation
sys.path.insert(0, sys.argv[1])
head = subprocess.Popen([sys.executable, "-c", sys.argv[5]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
address = head.stdout.readline().strip()
importlib.import_module("inside.forkserver.labelling").label_containers_of_tasks(address, {"stack": "s"}, "rollout")
import ray

@ray.remote(max_retries=0)
def inner(value):
    return [correlation.current_rollout_id(), value]

def labels():
    # of a container that is made here without the registry of NeMo Gym, as anyterminal_agent does
    sandbox = importlib.import_module("nemo_gym.sandbox")
    docker = importlib.import_module("nemo_gym.sandbox.providers.docker")
    try:
        asyncio.run(docker.DockerProvider().create(sandbox.SandboxSpec(image="none")))
    except docker.DockerCreateError as error:  # the program that stands in for docker shows its arguments
        words = str(error).split()
        return [each for word, each in zip(words, words[1:]) if word == "--label"]

@ray.remote(max_retries=0)
def outer(value, url=None):
    return [correlation.current_rollout_id(), value, labels(), ray.get(inner.remote(value))]

@ray.remote(max_retries=0)
def counting(count):
    for number in range(count):
        yield number

@ray.remote(max_retries=0)
def without_gym():
    return "ran"

found = {"unknown": ray.get(inner.remote(1))}
with correlation.rollout_context(sys.argv[2]):
    found["of a request"] = ray.get(outer.remote(ray.put(2)))
found["by a URL"] = ray.get(outer.remote(3, url=f"http://127.0.0.1:1/ng-rollout/{sys.argv[3]}/v1"))
found["options"] = ray.get(outer.options(num_cpus=1).remote(value=4))
found["generator"] = [ray.get(each) for each in counting.remote(3)]
hidden = {"env_vars": {"PYTHONPATH": sys.argv[4]}}  # where nemo_gym.sandbox cannot be imported
found["without sandboxes"] = ray.get(without_gym.options(runtime_env=hidden).remote())
ray.shutdown()
head.communicate()
print(json.dumps(found))
"""
HEAD = """
import ray, sys
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


def test_tasks_know_their_rollout_and_work_as_ever(tmp_path: Path) -> None:
    package = tmp_path / "hidden" / "nemo_gym"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (program := tmp_path / "program.py").write_text(PROGRAM)
    (docker := tmp_path / "bin" / "docker").parent.mkdir()
    docker.write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n')
    docker.chmod(0o755)
    source = Path(inside.__file__).parents[1]
    python = ensure_runtime(RuntimeConfig(version="0.7.0")).python
    command = [str(word) for word in (python, program, source, KEYS["a"], KEYS["b"], package.parent, HEAD)]
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    environment = os.environ | ray | {"PATH": f"{docker.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    labels = {name: [*STACK, f"rollout={rollout_label(key)}"] for name, key in KEYS.items()}
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "unknown": [None, 1],
        "of a request": [KEYS["a"], 2, labels["a"], [KEYS["a"], 2]],
        "by a URL": [KEYS["b"], 3, labels["b"], [KEYS["b"], 3]],
        "options": [None, 4, STACK, [None, 4]],
        "generator": [0, 1, 2],
        "without sandboxes": "ran",
    }
