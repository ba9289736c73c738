"""Where gymgate asks the machine itself, the simulated network answers; nothing in `src` knows of it.

`entered` replaces, while a universe runs, `select.poll` and `fcntl.ioctl` for simulated sockets (which get numbers of their own)
and gives a port to whoever listens on port 0. File limits are left as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import itertools
import resource
import select
import termios
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

from aiohttp import web_protocol
from parts import KEPT_IN_SETS
from simloom import SimNetwork, SimTransport
from simloom._context import current_host
from simloom._loop import SimLoop

FIRST_NUMBER = 1_000_000
"""Of a simulated socket: beyond any real descriptor."""
FIRST_PORT = 20_000
LOOPBACK = "127.0.0.1"


class _Socket:
    """What simloom's socket has, and a number."""

    def __init__(self, simulated: Any, number: int) -> None:
        self._simulated = simulated
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulated, name)

    def fileno(self) -> int:
        return self._number

    def getsockopt(self, *args: Any) -> Any:
        """Return the credentials of no process (`SO_PEERCRED`), as for one in another PID namespace."""
        return bytes(args[2]) if len(args) > 2 else 0


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """Patch the seams, for one universe."""
    transports: WeakValueDictionary[int, SimTransport] = WeakValueDictionary()
    left_behind: list[Any] = []
    numbers, ports = itertools.count(FIRST_NUMBER), itertools.count(FIRST_PORT)
    make_transport, listen, ioctl = SimTransport.__init__, SimNetwork.create_server, fcntl.ioctl
    finish_closing, release_others = SimTransport._finalize, SimNetwork._release
    send_item, deliver_item, arrive_item = SimTransport._send, SimTransport._deliver, SimTransport._arrive
    drain_ready = SimLoop._drain_ready

    def numbered(self: Any, *args: Any, **kwargs: Any) -> None:
        make_transport(self, *args, **kwargs)
        number = next(numbers)
        transports[number] = self
        self._extra["socket"] = _Socket(self._extra["socket"], number)

    class Poll:
        """`select.poll`, for whether something waits to be read."""

        def register(self, number: int, events: int) -> None:
            self._number = number

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            transport: Any = transports.get(self._number)
            if transport is None or transport._closed:
                return [(self._number, select.POLLIN)]
            is_near = transport.get_extra_info("peername")[0] == LOOPBACK  # what was sent has arrived
            waits = transport._inbox or (is_near and transport._pending)
            return [(self._number, select.POLLIN)] if waits else []

    # What a kernel knows of the other's: data acknowledge what had arrived when they were sent, not when they arrive.
    def send(self: Any, item: object) -> None:
        self._peer.__dict__.setdefault("acknowledging", deque()).append(self.__dict__.get("arrived", 0))
        self.sent = self.__dict__.get("sent", 0) + (len(item) if isinstance(item, bytes) else 0)
        send_item(self, item)

    def deliver(self: Any, protocol: Any, data: bytes) -> None:
        self.acknowledged = self.acknowledging.popleft()
        try:
            deliver_item(self, protocol, data)
        finally:
            self.acknowledged = None

    def arrive(self: Any) -> None:
        if not self._closed and self._pending:
            item = self._pending[0]
            self.arrived = self.__dict__.get("arrived", 0) + (len(item) if isinstance(item, bytes) else 0)
        arrive_item(self)

    # A kernel goes on to send what a process left behind when it closed a connection; simloom forgets it in a partition.
    def finish(self: Any) -> None:
        if self._held:
            left_behind.append(self)
        finish_closing(self)

    def release(self: Any) -> None:
        release_others(self)
        for transport in left_behind:
            transport._closed = False
            transport._flush_held()
            transport._closed = True

    def asked(number: int, what: int, answer: Any = 0, *rest: Any) -> Any:
        if number < FIRST_NUMBER:
            return ioctl(number, what, answer, *rest)
        transport: Any = transports.get(number)
        if what != termios.TIOCOUTQ or transport is None or transport._closed:
            raise OSError("the simulated socket is closed")
        acknowledged = transport.__dict__.get("acknowledged")
        if acknowledged is None:
            acknowledged = transport._peer.__dict__.get("arrived", 0)
        answer[0] = transport.__dict__.get("sent", 0) - acknowledged
        return 0

    async def listen_on_a_free_port(
        self: Any, factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        return await listen(self, factory, host, next(ports) if port == 0 else port, **options)

    # After a universe, simloom runs what crashed hosts leave to be done, e.g. a task's first step, outside of its loop.
    def drain(self: Any, *args: Any) -> None:
        asyncio._set_running_loop(self)
        try:
            drain_ready(self, *args)
        finally:
            asyncio._set_running_loop(None)

    class HostedTask(asyncio.Task[Any]):
        """What aiohttp makes past its loop: it has to end when its host crashes."""

        def __init__(self, *args: Any, **options: Any) -> None:
            if (host := current_host.get()) is not None:
                host._register(self)
            super().__init__(*args, **options)
            # It fails if a connection is lost between its bytes and the task's turn, an order that no real loop takes.
            self.add_done_callback(lambda task: task.cancelled() or task.exception())

    class OwnAsyncio:
        Task = HostedTask

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    with contextlib.ExitStack() as patches:
        for where, name, new in (
            (SimTransport, "__init__", numbered),
            (SimTransport, "_send", send),
            (SimTransport, "_deliver", deliver),
            (SimTransport, "_arrive", arrive),
            (SimTransport, "_finalize", finish),
            (SimNetwork, "_release", release),
            (SimLoop, "_drain_ready", drain),
            (SimNetwork, "create_server", listen_on_a_free_port),
            (select, "poll", Poll),
            (web_protocol, "asyncio", OwnAsyncio()),
            (fcntl, "ioctl", asked),
            (resource, "setrlimit", lambda *_: None),
        ):
            patches.enter_context(mock.patch.object(where, name, new))
        for kept_in_sets in KEPT_IN_SETS:
            number = functools.partial(number_of, itertools.count())
            patches.enter_context(
                mock.patch.object(kept_in_sets, "__hash__", lambda self, number=number: number(self))
            )
        yield


def number_of(numbers: Iterator[int], thing: Any) -> int:
    """Return the number that a thing has from its first use on."""
    if (number := vars(thing).get("simulated number")) is None:
        number = vars(thing)["simulated number"] = next(numbers)
    return int(number)


def number_tasks(loop: Any) -> None:
    """Let sets of tasks and futures have one order in each run of a universe; by default it is that of their addresses."""
    numbers = itertools.count()

    class Numbered:
        def __new__(cls, *_: Any, **__: Any) -> Any:
            made = super().__new__(cls)
            made.number = next(numbers)
            return made

        def __hash__(self) -> int:
            return self.number

    class Task(Numbered, asyncio.Task):
        __hash__ = Numbered.__hash__

    class Future(Numbered, asyncio.Future):
        __hash__ = Numbered.__hash__

    loop.set_task_factory(lambda loop, coro, **options: Task(coro, loop=loop, **options))
    loop.create_future = lambda: Future(loop=loop)
