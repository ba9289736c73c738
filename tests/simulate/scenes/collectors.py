"""Two processes that collect into one directory: one of them may write, and another one goes on when it ends or is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container
from typing import Any

import simloom
from invariants import Ledger, Violation
from parts import ConfigError, StackLostError
from universes import Scene

from scenes.collect import ALL, Run, account, directory, new_run, take
from scenes.disk import Disk, kill
from scenes.faults import seconds

PROCESSES, VISITS = 2, 3


async def play(world: Any, ledger: Ledger) -> None:
    writing: list[Run] = []
    given: dict[str, Any] = {}

    def watch(run: Run) -> None:
        """Note while the run has its directory."""
        open_ = run._open

        def opened(exits: contextlib.AsyncExitStack) -> Container[Any]:
            done = open_(exits)
            if writing:
                raise Violation("two processes write to one directory")
            writing.append(run)
            exits.callback(writing.remove, run)
            return done

        run._open = opened  # type: ignore[method-assign]

    async def visit(run: Run, goes_after: int | None) -> None:
        try:
            await take(run, given, goes_after=goes_after)
        except ConfigError:
            if not writing:
                raise Violation("a directory was refused that nobody writes to") from None
            simloom.reached("refused")
        except StackLostError:
            pass

    async def come_and_go(number: int) -> None:
        for time in range(VISITS):
            await asyncio.sleep(seconds("pause", 6.0))
            run, host = new_run(output, ledger, most_losses=1), world.host(f"process{number}.{time}")
            watch(run)
            goes_after = None if simloom.draw("stays", 2) else simloom.draw("goes after", ALL)
            patience = seconds("until it is killed", 12.0) if simloom.sometimes("killed", 30) else None
            task = host.spawn(lambda run=run, goes_after=goes_after: visit(run, goes_after))
            await asyncio.wait([task], timeout=patience)
            if task.done():
                task.result()
            else:
                kill(host, run, disk, writes=run in writing)
                if run in writing:
                    writing.remove(run)

    with directory() as output:
        disk = Disk(output)
        with disk.entered():
            async with asyncio.TaskGroup() as processes:
                for number in range(PROCESSES):
                    processes.create_task(come_and_go(number))
            run = new_run(output, ledger, most_losses=0)
            told = await take(run, given)
            assert told is not None
            account(run, told)


SCENE = Scene(
    "collectors",
    play,
    ("refused", "killed", "killed in a line", "caller goes", "stack lost"),
    deadline_s=900,
)
