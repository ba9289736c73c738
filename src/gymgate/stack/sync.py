"""Stacks for plain threads: every call runs on one private event loop, which lives while somebody uses it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, Self, TypeVar

from gymgate.config import CallableEndpoint, RayCluster, RolloutLimits, StackConfig
from gymgate.runtime.command import Progress
from gymgate.stack.client import (
    NOT_PICKLED,
    AgentInfo,
    OpenRoute,
    Policy,
    PolicyCallable,
    Stack,
)
from gymgate.stack.leases import connect

T = TypeVar("T")
P = ParamSpec("P")


class LoopThread:
    """An event loop in a daemon thread, from the first user to the last.

    Not anyio's blocking portal: that one cancels a task again at each await until the task has ended, and a cancelled
    caller here still waits for the end of what it gives back.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self.lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None

    def enter(self) -> None:
        """Start the loop, unless it runs."""
        with self.lock:
            self.users += 1
            if self._running is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(loop,), daemon=True, name="gymgate-stack")
                self._running = loop, thread
                thread.start()

    def leave(self) -> None:
        """Stop the loop, if nobody else uses it."""
        with self.lock:
            self.users -= 1
            if self.users or self._running is None:
                return
            (loop, thread), self._running = self._running, None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

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
        """Start the work. Cancelling the future cancels it."""
        assert self._running is not None
        return asyncio.run_coroutine_threadsafe(work, self._running[0])


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


_loop_thread: LoopThread | None = None


def _current_loop_thread() -> LoopThread:
    global _loop_thread
    if _loop_thread is None or _loop_thread.pid != os.getpid():
        _loop_thread = LoopThread()
    return _loop_thread


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that runs the asynchronous one of the same name on the private loop."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._loop.call(getattr(self._async, method.__name__)(*args, **kwargs))
        return result

    return call


class SyncStack:
    """A `Stack` whose methods block. Any number of threads may use it at once; a plain callable gets a thread of its own."""

    def __init__(self, stack: Stack, loop: LoopThread) -> None:
        self._async = stack
        self._loop = loop

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    @property
    def config(self) -> StackConfig:
        """See `Stack`."""
        return self._async.config

    @property
    def agents(self) -> dict[str, AgentInfo]:
        """See `Stack.agents`."""
        return self._async.agents

    @property
    def gateway_url(self) -> str:
        """See `Stack.gateway_url`."""
        return self._async.gateway_url

    run = _blocking(Stack.run)
    status = _blocking(Stack.status)
    close = _blocking(Stack.close)

    def open_route(
        self,
        policy: Policy,
        *,
        limits: RolloutLimits | None = None,
        rollout_id: str | None = None,
        record_bodies: bool = False,
    ) -> SyncOpenRoute:
        """See `Stack.open_route`. Close the route, or use it in a `with` block."""
        opening = self._async.open_route(
            policy, limits=limits, rollout_id=rollout_id, record_bodies=record_bodies
        )
        return SyncOpenRoute(self._loop.call(opening), self._loop)

    def register(
        self, name: str, policy: PolicyCallable, *, dialect: Literal["chat", "responses"] = "chat"
    ) -> CallableEndpoint:
        """See `Stack.register`."""

        async def register() -> CallableEndpoint:  # the connection belongs to its loop
            return self._async.register(name, policy, dialect=dialect)

        return self._loop.call(register())

    def unregister(self, name: str) -> None:
        """See `Stack.unregister`."""
        self._async.unregister(name)


class SyncOpenRoute:
    """An `OpenRoute` whose methods block."""

    def __init__(self, route: OpenRoute, loop: LoopThread) -> None:
        self.key = route.key
        self.base_url = route.base_url
        self.rollout_id = route.rollout_id
        self._async = route
        self._loop = loop

    calls = _blocking(OpenRoute.calls)
    close = _blocking(OpenRoute.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def acquire_sync(
    config: StackConfig, *, where: RayCluster | None = None, progress: Progress | None = None
) -> Iterator[SyncStack]:
    """Acquire a stack for code without an event loop; see `acquire`. Threads that acquire one config share a connection.

    `progress` is called from another thread.
    """
    loop = _current_loop_thread()
    loop.enter()
    try:
        stack = loop.call(connect(config, where=where, progress=progress))
        try:
            yield SyncStack(stack, loop)
        finally:
            loop.call(stack.close())
    finally:
        loop.leave()
