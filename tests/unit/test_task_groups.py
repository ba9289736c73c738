"""Task groups that raise their first error: as itself, with its cause, from however deep a group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gymgate.core.errors import StackLostError
from gymgate.core.task_groups import beside, task_group


async def lose() -> None:
    try:
        raise ConnectionResetError("peer")
    except ConnectionResetError as error:
        raise StackLostError("the stack is gone") from error


async def in_a_task() -> None:
    async with task_group() as group:
        group.create_task(lose())


async def in_the_body() -> None:
    async with task_group():
        await lose()


async def in_a_group_within() -> None:
    async with task_group(), asyncio.TaskGroup() as group:
        group.create_task(lose())


async def in_work_beside() -> None:
    async with beside([lose()]):
        await asyncio.get_running_loop().create_future()


async def in_a_group_beside_work() -> None:
    async with beside([asyncio.sleep(60)]), asyncio.TaskGroup() as group:
        group.create_task(lose())


@pytest.mark.parametrize(
    "run", [in_a_task, in_the_body, in_a_group_within, in_work_beside, in_a_group_beside_work]
)
async def test_the_first_error_is_raised_as_itself_with_its_cause(run: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(StackLostError) as raised:
        async with asyncio.timeout(20):
            await run()
    assert isinstance(raised.value.__cause__, ConnectionResetError)
