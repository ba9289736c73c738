"""What crosses processes, as Ray pickles it."""

from __future__ import annotations

from typing import Any

import pytest
from test_faults_cancel import crosses, pickled

from gymgate.errors import GymgateError


def test_rays_pickler() -> None:
    crosses(pytest.importorskip("ray.cloudpickle").dumps)


@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_through_a_task_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs go there, come back equal, and name one stack; an error is raised here as what it was there."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        _node_ip_address="127.0.0.1",
    )
    try:

        def echo(values: list[Any]) -> list[Any]:
            return values

        def fail(error: Exception) -> None:
            raise error

        values = [value for value in pickled() if not isinstance(value, Exception)]
        assert ray.get(ray.remote(echo).remote(values)) == values
        for error in (value for value in pickled() if isinstance(value, GymgateError)):
            with pytest.raises(type(error), match="what failed"):
                ray.get(ray.remote(fail).remote(error))
    finally:
        ray.shutdown()
