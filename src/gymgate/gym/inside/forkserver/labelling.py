"""Which rollout a Docker container belongs to: a label that NeMo Gym's provider gives it. Imports nothing of gymgate."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..names import gym_symbol

ROLLOUT_KEY = re.compile(r"\b[0-9a-f]{32}\b")
_POLICY_URL = re.compile(r"/ng-rollout/([0-9a-f]{32})\b")


def rollout_label(key: str) -> str:
    """Return what a rollout's containers are labelled with: labels are no secret, the key is."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def label_containers(labels: Mapping[str, str], name: str) -> None:
    """Give containers that this process's Docker provider makes labels, and one of this name with their rollout.

    NeMo Gym knows the rollout in whose request it makes a container (`current_rollout_id`). Containers that are made
    outside of a request do not get that one. The provider's own class is changed, because some servers make one without
    NeMo Gym's registry, and without the settings of their config.
    """
    Docker: Any = gym_symbol("DockerProvider")
    current_rollout_id = gym_symbol("current_rollout_id")
    create = Docker.create

    async def create_labelled(provider: Any, spec: Any) -> Any:
        key = ROLLOUT_KEY.search(current_rollout_id() or "")
        all_labels = {**labels, name: rollout_label(key[0])} if key else labels
        own = spec.provider_options.get("run_args") or ()
        arguments = [own] if isinstance(own, str) else [*own]
        arguments += [word for label in all_labels.items() for word in ("--label", "=".join(label))]
        options = {**spec.provider_options, "run_args": arguments}
        return await create(provider, dataclasses.replace(spec, provider_options=options))

    Docker.create = create_labelled


def label_containers_of_tasks(address: str, labels: Mapping[str, str], name: str) -> None:
    """Connect this server to the Ray at an address, and label the containers that its workers make for the server.

    NeMo Gym, which would connect later, leaves the connection as it is. Only who connects can say what workers run first.
    """
    ray: Any = importlib.import_module("ray")
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    for module in (__name__, gym_symbol.__module__):  # workers cannot import them
        cloudpickle.register_pickle_by_value(sys.modules[module])

    def prepare_worker() -> None:
        with contextlib.suppress(ImportError):  # the worker has an environment of its own, without NeMo Gym
            label_containers(labels, name)
            start_tasks_in_rollouts()

    start_tasks_in_rollouts()
    ray.init(address=address, runtime_env={"worker_process_setup_hook": prepare_worker})


def start_tasks_in_rollouts() -> None:
    """Let functions that become Ray tasks from now on take their rollout along to the worker.

    Actors and generators work as ever, without a rollout.
    """
    ray: Any = importlib.import_module("ray")
    plain_remote = ray.remote

    def remote(*targets: Any, **options: Any) -> Any:
        if targets:
            return _remote(plain_remote, *targets)
        return functools.partial(_remote, plain_remote(**options))

    ray.remote = remote


def _remote(decorate: Callable[[Any], Any], target: Any) -> Any:
    """Return what Ray's decorator makes of a target; of a function, a task that takes its rollout along."""
    other_kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction
    if not inspect.isfunction(target) or any(is_kind(target) for is_kind in other_kinds):
        return decorate(target)
    return RolloutTask(decorate(_in_rollout(target)))


class RolloutTask:
    """A Ray task that is a part of the rollout in whose request or task it is started.

    Otherwise it is a part of the rollout whose policy's URL is among its arguments.
    """

    def __init__(self, task: Any) -> None:
        """`task` takes the id of the rollout before its own arguments."""
        self._task = task

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._task.remote(_rollout_of(args, kwargs), *args, **kwargs)

    def options(self, **options: Any) -> RolloutTask:
        return RolloutTask(self._task.options(**options))


def _rollout_of(*arguments: Any) -> str | None:
    with contextlib.suppress(ImportError):  # in a worker without NeMo Gym
        if (current := gym_symbol("current_rollout_id")()) is not None:
            return str(current)
    url = _POLICY_URL.search(repr(arguments))
    return url[1] if url else None


def _in_rollout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a Ray task with one more argument before its own: the id of its rollout."""

    def run(rollout_id: str | None, *args: Any, **kwargs: Any) -> Any:
        try:
            context = gym_symbol("rollout_context")(rollout_id)
        except ImportError:  # in a worker without NeMo Gym
            context = contextlib.nullcontext()
        with context:
            return function(*args, **kwargs)

    for attribute in ("__module__", "__name__", "__qualname__"):  # which Ray shows
        setattr(run, attribute, getattr(function, attribute))
    return run
