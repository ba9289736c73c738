"""What crosses processes, as Ray pickles it, and as it comes back from a task of Ray's."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate.rollouts import ModelCall, Rollout, RolloutError, Segment
from support.pickles import crosses, pickled
from support.ray_cluster import ray_on_loopback

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


def test_rays_pickler() -> None:
    crosses(pytest.importorskip("ray.cloudpickle").dumps)


def rollout() -> Rollout:
    call = ModelCall(
        index=0, dialect="chat", request={"messages": []}, prompt_token_ids=[1, 2], logprobs=[-0.5]
    )
    error = RolloutError(kind="policy", message="gone", type="PolicyError", status_code=502)
    told: dict[str, Any] = {"environment": "mcqa", "agent": "a", "status": "failed", "error": error}
    return Rollout(id="r", calls=[call], **told)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_through_ray_tasks() -> None:
    """As an argument, from one task to the next by reference, and as a result; in workers with an interpreter of their own."""
    ray = pytest.importorskip("ray", reason="needs Ray: run ./dev train")
    segment = Segment(prompt_ids=[1, 2], completion_ids=[3], mask=[1], logprobs=[-0.5], policy_version=(1, 2))
    values = [*pickled(), rollout(), segment]
    with ray_on_loopback(num_cpus=1, object_store_memory=100_000_000, logging_level="ERROR"):
        same = ray.remote(lambda found: found)
        back = ray.get(same.remote(same.remote(values)), timeout=120)
    for value, again in zip(values, back, strict=True):
        assert type(again) is type(value)
        assert str(again) == str(value)
        if isinstance(value, Exception):
            assert again.__dict__ == value.__dict__
        else:
            assert again == value
