"""Stacks for plain threads: every call runs on one private event loop, which lives while it is used."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, Self, TypeVar

from gymgate.config import CallableEndpoint, Endpoint, RolloutLimits, StackConfig
from gymgate.rollout import ModelCall, Rollout
from gymgate.stack.client import (
    NOT_PICKLED,
    AgentInfo,
    OpenRoute,
    Policy,
    PolicyCallable,
    Progress,
    Stack,
)
from gymgate.stack.leases import connect

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, from the first user to the last."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self.lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        with self.lock:
            self.users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), daemon=True)
                self._thread.name = "gymgate-stack"
                self._thread.start()

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users or self._loop is None or self._thread is None:
                return
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result; interrupting the wait (Ctrl-C) cancels the work and waits for it to end."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=1.0)
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the work; cancelling the future cancels it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_forever()


_loop_thread: LoopThread | None = None


def _current_loop_thread() -> LoopThread:
    global _loop_thread
    if _loop_thread is None or _loop_thread.pid != os.getpid():
        _loop_thread = LoopThread()
    return _loop_thread


class SyncStack:
    """A `Stack` whose methods block; any number of threads may use it at once."""

    def __init__(self, stack: Stack, loop: LoopThread) -> None:
        self._stack = stack
        self._loop = loop

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    @property
    def config(self) -> StackConfig:
        """As of `Stack`."""
        return self._stack.config

    @property
    def agents(self) -> dict[str, AgentInfo]:
        """As of `Stack`."""
        return self._stack.agents

    @property
    def gateway_url(self) -> str:
        """As of `Stack`."""
        return self._stack.gateway_url

    def run(
        self,
        row: Mapping[str, Any],
        *,
        policy: Policy,
        environment: str | None = None,
        agent: str | None = None,
        limits: RolloutLimits | None = None,
        rollout_id: str | None = None,
        record_bodies: bool = True,
        judge_policy: Endpoint | None = None,
    ) -> Rollout:
        """As `Stack.run`. A plain callable runs in a thread of its own."""
        work = self._stack.run(
            row,
            policy=policy,
            environment=environment,
            agent=agent,
            limits=limits,
            rollout_id=rollout_id,
            record_bodies=record_bodies,
            judge_policy=judge_policy,
        )
        return self._loop.call(work)

    def open_route(
        self,
        policy: Policy,
        *,
        limits: RolloutLimits | None = None,
        rollout_id: str | None = None,
        record_bodies: bool = True,
    ) -> SyncOpenRoute:
        """As `Stack.open_route`; close the route, or use it in a `with` block."""
        work = self._stack.open_route(
            policy, limits=limits, rollout_id=rollout_id, record_bodies=record_bodies
        )
        return SyncOpenRoute(self._loop.call(work), self._loop)

    def register(
        self, name: str, policy: PolicyCallable, *, dialect: Literal["chat", "responses"] = "chat"
    ) -> CallableEndpoint:
        """As `Stack.register`."""

        async def register() -> CallableEndpoint:  # the connection belongs to its loop
            return self._stack.register(name, policy, dialect=dialect)

        return self._loop.call(register())

    def status(self) -> dict[str, Any]:
        """As `Stack.status`."""
        return self._loop.call(self._stack.status())

    def close(self) -> None:
        """As `Stack.close`; the end of the `acquire_sync` block does it too."""
        self._loop.call(self._stack.close())


class SyncOpenRoute:
    """An `OpenRoute` whose methods block."""

    def __init__(self, route: OpenRoute, loop: LoopThread) -> None:
        self.key = route.key
        self.base_url = route.base_url
        self.rollout_id = route.rollout_id
        self._route = route
        self._loop = loop

    def calls(self) -> list[ModelCall]:
        """As `OpenRoute.calls`."""
        return self._loop.call(self._route.calls())

    def close(self) -> None:
        """As `OpenRoute.close`."""
        self._loop.call(self._route.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def acquire_sync(config: StackConfig, *, progress: Progress | None = None) -> Iterator[SyncStack]:
    """As `acquire`, for code without an event loop. Threads that acquire one config share a connection.

    `progress` is called from another thread.
    """
    loop = _current_loop_thread()
    loop.enter()
    try:
        stack = loop.call(connect(config, progress=progress))
        try:
            yield SyncStack(stack, loop)
        finally:
            loop.call(stack.close())
    finally:
        loop.leave()
