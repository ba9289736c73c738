"""What tests of the gateway share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.upstream import Upstream, upstream


@pytest.fixture
async def policy() -> AsyncIterator[Upstream]:
    async with upstream() as serving:
        yield serving
