"""Which rollout a Docker container belongs to: a label that NeMo Gym's provider gives it. Imports nothing of gymgate."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..names import gym_symbol

ROLLOUT_KEY = re.compile(r"\b[0-9a-f]{32}\b")
_ARGUMENT = "gymgate_rollout"
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
    if hasattr(Docker, "container_labels"):
        Docker.container_labels = labels
        return
    Docker.container_labels, create = labels, Docker.create

    async def create_labelled(provider: Any, spec: Any) -> Any:
        mine = dict(Docker.container_labels)
        if key := ROLLOUT_KEY.search(current_rollout_id() or ""):
            mine[name] = rollout_label(key[0])
        own = spec.provider_options.get("run_args") or ()
        arguments = [own] if isinstance(own, str) else [*own]
        arguments += [word for label in mine.items() for word in ("--label", "=".join(label))]
        options = {**spec.provider_options, "run_args": arguments}
        return await create(provider, dataclasses.replace(spec, provider_options=options))

    Docker.create = create_labelled


def label_containers_of_tasks(labels: Mapping[str, str], name: str) -> None:
    """Let the Ray tasks that this server starts work as parts of their rollout, in Ray's workers, and label containers there.

    A task's rollout is the one in whose request it is started, else the one whose policy's URL is among its arguments.
    Tasks that a task starts, actors, and workers without NeMo Gym's sandboxes work as ever, without a rollout. So do all tasks
    of a Ray that starts them in another way; the server's log says so.
    """
    RemoteFunction: Any = getattr(importlib.import_module("ray.remote_function"), "RemoteFunction", None)
    if not _starts_tasks(RemoteFunction):
        version = getattr(importlib.import_module("ray"), "__version__", "")
        print(
            f"warning: Ray {version} starts tasks in another way than gymgate knows: Docker containers that they make get no "
            "label, so nothing removes those that they leave behind",
            file=sys.stderr,
            flush=True,
        )
        return
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    for module in (__name__, gym_symbol.__module__):  # workers cannot import them
        cloudpickle.register_pickle_by_value(sys.modules[module])
    submit, first_use = RemoteFunction._remote, threading.Lock()

    def submit_with_rollout(
        task: Any, args: Any = None, kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        with first_use:
            if not hasattr(task, "labels_containers"):
                task._function = _in_rollout(task._function, labels, name)
                task.labels_containers = True
        labelled = {**(kwargs or {}), _ARGUMENT: _rollout_of(args, kwargs)}
        return submit(task, args, labelled, **options)

    RemoteFunction._remote = submit_with_rollout


def _starts_tasks(RemoteFunction: Any) -> bool:
    """Whether Ray starts a task by the private method that is replaced, with the arguments that are read. Starts none."""
    calls: list[Any] = []

    def note(task: Any, args: Any = None, kwargs: Any = None, **options: Any) -> None:
        calls.append((tuple(args), kwargs, callable(task._function), options.get("num_cpus")))

    submit = getattr(RemoteFunction, "_remote", None)
    if submit is None:
        return False
    RemoteFunction._remote = note
    try:
        task = importlib.import_module("ray").remote(_rollout_of)
        task.remote(1, a=2)
        task.options(num_cpus=3).remote(1, a=2)
    except Exception:  # of a private method, which a release may change in any way
        return False
    finally:
        RemoteFunction._remote = submit
    return [call[:3] for call in calls] == [((1,), {"a": 2}, True)] * 2 and calls[1][3] == 3


def _rollout_of(*arguments: Any) -> str | None:
    if (current := gym_symbol("current_rollout_id")()) is not None:
        return str(current)
    url = _POLICY_URL.search(repr(arguments))
    return url[1] if url else None


def _in_rollout(function: Callable[..., Any], labels: Mapping[str, str], name: str) -> Callable[..., Any]:
    """Return the function of a Ray task with one more argument, by its name: the id of its rollout."""

    def run(*args: Any, **kwargs: Any) -> Any:
        rollout_id = kwargs.pop(_ARGUMENT, None)  # a task that another task starts has none
        try:
            label_containers(labels, name)
            rollout_context = gym_symbol("rollout_context")
        except ImportError:  # the task has an environment of its own
            return function(*args, **kwargs)
        with rollout_context(rollout_id):
            return function(*args, **kwargs)

    for attribute in ("__module__", "__name__", "__qualname__"):  # which Ray shows
        setattr(run, attribute, getattr(function, attribute))
    return run
