"""A stack for the tests of a module that has a fixture `config`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from gymgate.core.config import StackConfig
from gymgate.stack import Stack, SyncStack, acquire, acquire_sync


@pytest.fixture(scope="module")
def held(config: StackConfig) -> Iterator[SyncStack]:
    """A lease for the module, so that each test joins a stack that is up."""
    with acquire_sync(config) as stack:
        yield stack


@pytest.fixture
async def stack(held: SyncStack, config: StackConfig) -> AsyncIterator[Stack]:
    async with acquire(config) as stack:
        yield stack
