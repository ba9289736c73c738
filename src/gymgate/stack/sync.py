"""The way in for code without an event loop: an event loop in a thread, and a stack on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from gymgate.core.config import RayCluster, StackConfig
from gymgate.core.errors import StackLostError
from gymgate.gym.runtime.command import Progress
from gymgate.rollouts import Rollout
from gymgate.stack.acquisition import connect
from gymgate.stack.client.stack import Policy, Stack

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, until `stop` or the end of a `with` block. Any thread may use it meanwhile.

    Not anyio's blocking portal: that one cancels a task again at each await until the task has ended, and a cancelled
    caller here still waits for the end of what it gives back.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="gymgate-stack")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def call(
        self,
        work: Coroutine[Any, Any, T],
        meanwhile: Callable[[concurrent.futures.Future[T]], None] | None = None,
    ) -> T:
        """Return the result. Interrupting the wait (Ctrl-C) cancels the work and waits for it to end.

        `meanwhile` runs on this thread until the future that it is given is done.
        """
        future = self.submit(work)
        try:
            if meanwhile is not None:
                meanwhile(future)
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=1.0)
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the work. Cancelling the future cancels it. Raises `StackLostError` in a forked child, which has no loop."""
        if not self._thread.is_alive():
            work.close()
            raise StackLostError("the stack was acquired by another process; acquire it again in this one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, run in a thread: the caller's may run an event loop, as a notebook's does.

    Ctrl-C cancels it and waits for its end.
    """
    with LoopThread() as loop:
        return loop.call(work)


class SyncStack:
    """A stack for code without an event loop. Any number of threads may use it at once."""

    def __init__(self, stack: Stack, loop: LoopThread) -> None:
        self.stack = stack
        """Its properties, `register` and `unregister` can be used directly, its coroutines through `call`."""
        self._loop = loop

    def run(self, row: Mapping[str, Any], *, policy: Policy, **settings: Any) -> Rollout:
        """Run one row; see `Stack.run`. A plain callable gets a thread of its own."""
        return self.call(self.stack.run(row, policy=policy, **settings))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine of `stack`, such as `stack.status()`. Ctrl-C cancels it."""
        return self._loop.call(work)


@contextmanager
def acquire_sync(
    config: StackConfig, *, where: RayCluster | None = None, progress: Progress | None = None
) -> Iterator[SyncStack]:
    """Acquire a stack for code without an event loop; see `acquire`. `progress` is called from another thread."""
    with LoopThread() as loop:
        stack = loop.call(connect(config, where=where, progress=progress))
        try:
            yield SyncStack(stack, loop)
        finally:
            loop.call(stack.close())
