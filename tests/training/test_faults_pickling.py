"""What crosses processes, as Ray pickles it."""

from __future__ import annotations

import pytest
from test_faults_cancel import crosses


def test_rays_pickler() -> None:
    crosses(pytest.importorskip("ray.cloudpickle").dumps)
