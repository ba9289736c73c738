"""NeMo Gym's middlewares with the same behaviour for less CPU time, in place of the release's where its code was checked.

Every server of NeMo Gym wraps its application in two `BaseHTTPMiddleware`s and a listener for clients that hang up: tasks, task
groups and queues that are most of the CPU time of a small request. `LeanHTTP` and `LeanCancellation` call the application in the
request's own task. The release's own functions still decide what is answered and logged.

`unchecked` compares the code that all of this depends on with `CHECKED`. Each server keeps the release's middlewares where
anything differs, or where its class has its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from .names import gym_place, gym_symbol

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Dispatch = Callable[[Any, Callable[[Any], Awaitable[Any]]], Awaitable[Any]]

CHECKED: dict[str, tuple[str, ...]] = {
    "nemo_gym.server_utils": (
        "d68698e42bc1db11ac39ac6414fa22d53926c80f415382546dabb638c635e656",  # 0.7.0
        "d5f019f0b3b0033613eb5781d395fc639238a312ff050bba3d72071a937c047c",  # 0.6.0
    ),
    "starlette.middleware.base": ("d054b70ac0cff44bb83b08a39c48542f25be8305c2e547a91635498c4ffc44d0",),
    "starlette.middleware.sessions": ("1eb1ccea4379d8f469fba034316a5ae923bf30cdc9e1a6229eff48062bc909a3",),
    "uvicorn.protocols.http.httptools_impl": (
        "1d4e1c579df4168433a61a01f10c628b31c1790e72dd9769d2b8633b22214033",
    ),
    "uvicorn.protocols.http.flow_control": (
        "d39d16560df512f3ce907c329c2a0c3f5cd7165fef3b753876eae5739bf2a785",
    ),
}
"""SHA-256 of each module's file, in the releases whose behaviour the tests compare."""
SETUPS = ("setup_session_middleware", "setup_exception_middleware", "setup_cancellation_middleware")
"""The methods of a server that add middlewares; 0.6 has not the last one."""

GROUP = "unhandled errors in a TaskGroup"
"""As in the releases, where an exception comes out of task groups."""

CHECKED_FOR_OWN_CALLS = {
    "aiohttp.connector": ("49cc264ebc7d8dcbbb9181ad65f19ee171fc56765eb195d270dafa53716055a1",),
    "aiohttp.client_proto": ("e2245a9166011c6094248f8b2ac2f5f69eeed4e4a1827d0c17f123efeeb6b9df",),
    "uvicorn.server": ("c1be9d133467a42ab88d7168e408ef5a90257661a901899426214a3d1fc2d026",),
}
"""The same for an agent's connections to itself."""
OWN_CALLS = "an agent's connection to itself"
COLLECTOR = (50_000, 20, 50)
"""Thresholds of the garbage collector: it goes through all objects of a server less often, for 5 MB."""
MOST_AT_ONCE = 1 << 18
"""Bytes that a connection in memory hands over at once, as uvloop does."""
MOST_WAITING, FEW_WAITING = 1 << 16, 1 << 14
"""Bytes that wait to be read before a sender is asked to pause, and to go on."""


def unchecked(modules: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return why this interpreter's servers stay as in the release; `None` if the modules are as they were checked."""
    for name, digests in modules.items():
        try:
            spec = importlib.util.find_spec(name)
            content = Path(str(spec and spec.origin)).read_bytes()
        except (ImportError, OSError):
            return f"{name} is not there"
        if hashlib.sha256(content).hexdigest() not in digests:
            return f"{name} is not as in a checked release"
    return None


def install(noted: Path) -> None:
    """Let servers of this process use lean middlewares.

    `noted` gets a JSON object, of why something is as in the release: none, or one by the method that adds a middleware.
    """
    kept: dict[str, str] = {}

    def keep(what: str, reason: str) -> None:
        if what not in kept:
            print(f"gymgate: {what} stays NeMo Gym's own, which takes more CPU time: {reason}", flush=True)
        kept[what] = reason

    def replacement(name: str, released: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def setup(server: Any, app: Any) -> None:
            before = [*app.user_middleware]
            released(server, app)
            if (reason := _reason_to_keep(server, name, replaced)) is not None:
                keep(name, reason)
            else:
                app.user_middleware[:] = [
                    entry if any(entry is other for other in before) else _lean(entry)
                    for entry in app.user_middleware
                ]
            if name == last and name not in kept and own_calls is not None and isinstance(server, Agent):
                own_calls.follow(server, app)
            noted.write_text(json.dumps(kept))

        return setup

    if (reason := unchecked(CHECKED)) is not None:
        keep("every middleware", reason)
        noted.write_text(json.dumps(kept))
        return
    gc.set_threshold(*COLLECTOR)
    Server, Agent = gym_symbol("SimpleServer"), gym_symbol("SimpleResponsesAPIAgent")
    replaced = {name: replacement(name, getattr(Server, name)) for name in SETUPS if name in Server.__dict__}
    last = [*replaced][-1]
    own_calls = None
    if (reason := unchecked(CHECKED_FOR_OWN_CALLS)) is None:
        own_calls = OwnCalls(gym_place("SimpleServer"))
    else:
        keep(OWN_CALLS, reason)
    for name, setup in replaced.items():
        setattr(Server, name, setup)


def _reason_to_keep(server: Any, name: str, replaced: dict[str, Callable[[Any, Any], None]]) -> str | None:
    """Return why a server keeps the release's middleware; `None` if it gets the lean one."""
    own = [other for other, setup in replaced.items() if getattr(type(server), other) is not setup]
    if own:
        return f"{type(server).__name__} has its own {own[0]}"
    if name == SETUPS[0] and getattr(getattr(server, "config", None), "expose_tools_over_mcp", False):
        return "its tools are exposed over MCP"
    return None


def _lean(entry: Any) -> Any:
    """Return the lean counterpart of an entry of `user_middleware`, or the entry if it has none."""
    base: Any = importlib.import_module("starlette.middleware.base")
    Middleware: Any = importlib.import_module("starlette.middleware").Middleware
    released = getattr(gym_place("SimpleServer"), "ClientDisconnectCancellationMiddleware", None)
    if entry.cls is base.BaseHTTPMiddleware:
        return Middleware(LeanHTTP, *entry.args, **entry.kwargs)
    if entry.cls is released and released is not None:
        return Middleware(LeanCancellation, *entry.args, released=released, **entry.kwargs)
    return entry


class LeanHTTP:
    """Starlette's `BaseHTTPMiddleware`, for a function that returns the answer of `call_next` or one of its own.

    The application runs in the request's own task and sends directly. So `call_next` returns nothing, and only once the
    application has ended. The function cannot tell: it is told of an exception exactly if no answer had begun.
    """

    def __init__(self, app: App, dispatch: Dispatch) -> None:
        self.app = app
        self.dispatch = dispatch
        self.Request: Any = importlib.import_module("starlette.requests").Request
        self.EndOfStream: Any = importlib.import_module("anyio").EndOfStream

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = complete = unsendable = False
        late: BaseException | None = None

        async def receive_until_complete() -> Message:
            if complete:
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.disconnect":
                await asyncio.sleep(0)  # the application sees the cancellation that comes with it instead
            return message

        async def send_on(message: Message) -> None:
            nonlocal started, complete, unsendable
            if complete:
                return
            started = True
            try:
                await send(message)
            except BaseException:
                unsendable = True
                raise
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        async def call_next(request: Any) -> None:
            nonlocal late
            try:
                await self.app(scope, receive_until_complete, send_on)
            except (SystemExit, KeyboardInterrupt) as error:
                await _end_loop(error)
            except BaseException as error:
                seen: BaseException | None = error
                if _is_cancelled():  # whatever the application makes of it
                    seen = error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError()
                elif isinstance(error, asyncio.CancelledError):
                    seen = None  # a stray one is no exception of a task
                if isinstance(seen, Exception | asyncio.CancelledError) and not started:
                    if seen is error:
                        raise
                    raise seen from None
                late = seen
            if not started:
                try:
                    raise self.EndOfStream
                except self.EndOfStream:  # so that logs have the same lines
                    raise RuntimeError("No response returned.")  # noqa: B904

        try:
            try:
                answer = await self.dispatch(self.Request(scope, receive, send), call_next)
            except RuntimeError as missing:
                if late is None:
                    raise
                raise BaseExceptionGroup(GROUP, [missing, late]) from None
            if not started:
                await answer(scope, receive, send)
            elif not (complete or unsendable or _is_cancelled()):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            if late is not None:
                raise late
        finally:
            late = None  # it refers to this frame


class LeanCancellation:
    """NeMo Gym's `ClientDisconnectCancellationMiddleware`, which cancels a request whose client hangs up.

    Nothing listens to the client: uvicorn sets an event of the request when the connection is lost. Where the body has not
    arrived yet, or something stands between uvicorn and the application, the release's middleware serves the request.
    """

    def __init__(self, app: App, released: Callable[[App], Any]) -> None:
        self.app = app
        self.released = released(app)
        self.CancelScope: Any = importlib.import_module("anyio").CancelScope
        self.Cycle: Any = importlib.import_module(
            "uvicorn.protocols.http.httptools_impl"
        ).RequestResponseCycle
        self.is_debugging = gym_place("SimpleServer").is_global_aiohttp_client_request_debug_enabled

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        cycle: Any = getattr(receive, "__self__", None)
        if (
            scope["type"] != "http"
            or type(cycle) is not self.Cycle
            or cycle.more_body
            or cycle.waiting_for_100_continue
        ):
            await self.released(scope, receive, send)
            return
        cycle.flow.resume_reading()  # as a listener does: a connection that is not read is never lost
        with self.CancelScope() as cancellation:

            def hung_up() -> None:
                if not cancellation.cancel_called:
                    self._count(scope)
                    cancellation.cancel()

            watched = WatchedEvent(cycle, hung_up)
            if cycle.message_event.is_set():
                watched.set()
            cycle.message_event = watched
            try:
                await self.app(scope, receive, send)
            except asyncio.CancelledError:
                if not cancellation.cancel_called:
                    raise
            except BaseException as error:
                raise BaseExceptionGroup(GROUP, [error]) from None
        if _is_cancelled():
            raise asyncio.CancelledError  # which the application turned into an answer

    def _count(self, scope: Message) -> None:
        """Count and print as the release's middleware does."""
        self.released.num_cancelled += 1
        if self.is_debugging() or self.released.num_cancelled % 100 == 0:
            client = scope.get("client")
            address = f"{client[0]}:{client[1]}" if client else "-:-"
            print(
                f'{address} - "{scope["method"]} {scope["path"]}" '
                f"499 CLIENT DISCONNECTED ({self.released.num_cancelled} total for this server worker)"
            )


class WatchedEvent(asyncio.Event):
    """The event that uvicorn sets for news of a request; calls a function if the news is that its client hung up."""

    def __init__(self, cycle: Any, hung_up: Callable[[], None]) -> None:
        super().__init__()
        self._cycle = cycle
        self._hung_up = hung_up

    def set(self) -> None:
        super().set()
        if self._cycle.disconnected:
            self._hung_up()


class OwnCalls:
    """Connects an agent to itself in memory: most agents' `/run` calls their own `/v1/responses`.

    Both ends are aiohttp's and uvicorn's own, which read and write HTTP as ever; only the socket between them is not there. It is
    there for a client with traces, a timed pool or a proxy, and in another event loop than the server's.
    """

    def __init__(self, gym: Any) -> None:
        self._connector: Any = importlib.import_module("aiohttp").TCPConnector
        self._server: Any = None
        """uvicorn's protocol of the first connection."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.copy_context()
        self._address: tuple[str, int] | None = None
        make_client = gym.set_global_aiohttp_client

        def make_connected_client(settings: Any) -> Any:
            client = make_client(settings)
            if type(client.connector) is self._connector and not client.trace_configs:
                self._connect(client.connector)
            return client

        gym.set_global_aiohttp_client = make_connected_client

    def follow(self, server: Any, app: Any) -> None:
        """Connect to a server that is about to start."""
        self._address = (server.config.host, server.config.port)
        self._context = contextvars.copy_context()
        app.add_middleware(Observed, see=self._see)

    def _see(self, receive: Receive) -> None:
        """Take note of the uvicorn that serves a request."""
        if self._server is None and (
            transport := getattr(getattr(receive, "__self__", None), "transport", None)
        ):
            self._server = transport.get_protocol()
            self._loop = asyncio.get_running_loop()

    def _connect(self, connector: Any) -> None:
        over_socket = connector._create_connection

        async def create_connection(request: Any, traces: Any, timeout: Any) -> Any:
            url = request.url
            if (
                self._server is None
                or self._loop is not asyncio.get_running_loop()
                or (url.scheme, (url.host, url.port)) != ("http", self._address)
                or request.proxy
                or traces
            ):
                return await over_socket(request, traces, timeout)
            client = connector._factory()
            server = self._server.config.http_protocol_class(
                config=self._server.config,
                server_state=self._server.server_state,
                app_state=self._server.app_state,
            )
            ends = MemoryTransport(contextvars.copy_context()), MemoryTransport(self._context.copy())
            for end, other, protocol in zip(ends, reversed(ends), (client, server), strict=True):
                end.start(protocol, other, self._address)
            return client

        connector._create_connection = create_connection


class Observed:
    """An application that shows each request to a function."""

    def __init__(self, app: App, see: Callable[[Receive], None]) -> None:
        self.app = app
        self.see = see

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.see(receive)
        await self.app(scope, receive, send)


class MemoryTransport(asyncio.Transport):
    """One end of a connection within this process. Each end's protocol is called in a context of its own, never by the other."""

    def __init__(self, context: contextvars.Context) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._unread = bytearray()
        self._reads = True
        self._is_scheduled = self._is_closing = self._pauses_writing = False
        self._protocol: Any = None
        self._other: MemoryTransport = self

    def start(self, protocol: Any, other: MemoryTransport, address: Any) -> None:
        """Connect to the other end, and tell the protocol."""
        self._other = other
        self._extra = {"peername": address, "sockname": address}
        self._protocol = protocol
        self._context.run(protocol.connection_made, self)

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_reading(self) -> bool:
        return self._reads and not self._is_closing

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        self._schedule()

    def get_write_buffer_size(self) -> int:
        return len(self._other._unread)

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        if self._is_closing or self._other._is_closing:
            return
        self._other._unread += data
        self._other._schedule()
        if not self._pauses_writing and self.get_write_buffer_size() > MOST_WAITING:
            self._pauses_writing = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Close both ends; the other one once it has read what was sent."""
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._protocol.connection_lost, None, context=self._context)
            self._other._schedule()

    def abort(self) -> None:
        self.close()

    def _schedule(self) -> None:
        if self._reads and not self._is_scheduled and (self._unread or self._other._is_closing):
            self._is_scheduled = True
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._is_scheduled = False
        if self._is_closing or not self._reads:
            return
        if not self._unread:
            self._protocol.eof_received()
            self.close()
            return
        data = bytes(self._unread[:MOST_AT_ONCE])
        del self._unread[:MOST_AT_ONCE]
        self._protocol.data_received(data)
        self._schedule()
        other = self._other
        if other._pauses_writing and len(self._unread) <= FEW_WAITING:
            other._pauses_writing = False
            self._loop.call_soon(other._protocol.resume_writing, context=other._context)


def _is_cancelled() -> bool:
    """Whether the current task was cancelled, which a `CancelledError` alone does not say."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _end_loop(error: BaseException) -> None:
    """End the event loop with an exception, as a task does that raises it; returns never, but may be cancelled."""

    def end() -> None:
        raise error

    asyncio.get_running_loop().call_soon(end)
    await asyncio.get_running_loop().create_future()
