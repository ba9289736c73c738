"""What crosses processes, as Ray pickles it, and as it comes back from a task of Ray's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from test_faults_cancel import crosses, pickled

from gymgate.rollout import ModelCall, Rollout, RolloutError, Segment

STARTS = 3
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


def test_rays_pickler() -> None:
    crosses(pytest.importorskip("ray.cloudpickle").dumps)


@contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Ray, which gives its own processes 30 s to come up: little on a machine with other work."""
    ray = pytest.importorskip("ray")
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short enough for its sockets
        try:
            for attempt in range(STARTS):
                try:
                    ray.init(
                        num_cpus=1,
                        include_dashboard=False,
                        object_store_memory=100_000_000,
                        log_to_driver=False,
                        logging_level="ERROR",
                        _temp_dir=f"{folder}/{attempt}",
                        _node_ip_address="127.0.0.1",
                    )
                    break
                except Exception as error:  # Ray raises no other class
                    ray.shutdown()
                    if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                        raise
            yield
        finally:
            ray.shutdown()


def rollout() -> Rollout:
    call = ModelCall(
        index=0, dialect="chat", request={"messages": []}, prompt_token_ids=[1, 2], logprobs=[-0.5]
    )
    segment = Segment(prompt_ids=[1, 2], completion_ids=[3], mask=[1], logprobs=[-0.5], policy_version=(1, 2))
    error = RolloutError(kind="policy", message="gone", type="PolicyError", status_code=502)
    told: dict[str, Any] = {"environment": "mcqa", "agent": "a", "status": "failed", "error": error}
    return Rollout(id="r", calls=[call], segments=[segment], **told)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_through_ray_tasks() -> None:
    """As an argument, from one task to the next by reference, and as a result; in workers with an interpreter of their own."""
    ray = pytest.importorskip("ray")
    values = [*pickled(), rollout()]
    with ray_on_loopback():
        same = ray.remote(lambda found: found)
        back = ray.get(same.remote(same.remote(values)), timeout=120)
    for value, again in zip(values, back, strict=True):
        assert type(again) is type(value)
        assert str(again) == str(value)
        if isinstance(value, Exception):
            assert again.__dict__ == value.__dict__
        else:
            assert again == value
