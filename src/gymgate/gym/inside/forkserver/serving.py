"""The program of a forked child: a NeMo Gym server, or the driver of a local Ray."""

from __future__ import annotations

import importlib
import os
import select
import sys
from pathlib import Path
from typing import Any

from .. import lean
from ..names import gym_place, gym_symbol
from ..processes import descendants
from .labelling import ROLLOUT_KEY, label_containers, label_containers_of_tasks

RAY_PROCESSES = ("gcs_server", "raylet")
"""Without these a Ray does nothing any more, though its drivers keep waiting for it."""


def serve(order: dict[str, Any]) -> None:
    """Become a NeMo Gym server; returns when it has shut down."""
    import runpy

    ray_support: Any = gym_place("initialize_ray")
    OmegaConf: Any = importlib.import_module("omegaconf").OmegaConf

    directory = order["directory"]
    os.chdir(directory)
    config = OmegaConf.create(order["config"])
    os.environ["NEMO_GYM_CONFIG_DICT"] = OmegaConf.to_yaml(config)
    os.environ["NEMO_GYM_CONFIG_PATH"] = order["instance"]
    os.environ["PYTHONPATH"] = directory
    if order["config"].get("telemetry"):  # which NeMo Gym's launcher hands to its servers in variables
        gym_symbol("configure_telemetry_env")(gym_symbol("telemetry_config_from_global_config")(config))
    if commands := order.get("commands"):
        os.environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    sys.path.insert(0, directory)
    sys.argv = [order["entrypoint"]]
    if not order["ray"]:
        ray_support.initialize_ray = lambda: print("Ray is not started: this server does not use it")
    if "multiprocessing.process" in sys.modules:  # where spawned workers look for the entrypoint
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = directory  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if labels := order.get("labels"):
        label_containers(labels, order["rollout_label"])
        if order["ray"]:
            address = order["config"]["ray_head_node_address"]
            label_containers_of_tasks(address, labels, order["rollout_label"])
    for stream in (sys.stdout, sys.stderr):
        keep_out_keys(stream)
    if noted := order.get("lean"):
        lean.install(Path(noted))
    runpy.run_path(os.path.join(directory, order["entrypoint"]), run_name="__main__")  # noqa: PTH118


def keep_out_keys(stream: Any) -> None:
    """Keep rollouts' keys, which Gym's messages show, out of what is written to a log."""
    write = stream.write
    stream.write = lambda text: write(ROLLOUT_KEY.sub("<key>", text))


def ray_head(order: dict[str, Any]) -> None:
    """Be the driver of a local Ray until killed, or until one of its processes dies; write its address to `out`."""
    ray: Any = importlib.import_module("ray")
    ray.init(include_dashboard=False, log_to_driver=False, _temp_dir=order["directory"])
    ready = Path(order["out"])
    ready.with_suffix(".tmp").write_text(ray.get_runtime_context().gcs_address)
    ready.with_suffix(".tmp").rename(ready)
    ended = select.poll()
    for pid in descendants(os.getpid()):
        if Path(f"/proc/{pid}/comm").read_text().strip() in RAY_PROCESSES:
            ended.register(os.pidfd_open(pid), select.POLLIN)
    ended.poll()
    os._exit(1)
