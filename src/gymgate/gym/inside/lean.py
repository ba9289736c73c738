"""NeMo Gym's middlewares with the same behaviour for less CPU time, in place of the release's where its code was checked.

Every server of NeMo Gym wraps its application in two `BaseHTTPMiddleware`s and a listener for clients that hang up: tasks, task
groups and queues that are most of the CPU time of a small request. `LeanHTTP` and `LeanCancellation` call the application in the
request's own task. The release's own functions still decide what is answered and logged.

`unchecked` compares the code that all of this depends on with `CHECKED`. Each server keeps the release's middlewares where
anything differs, or where its class has its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Awaitable, Callable, MutableMapping
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


def unchecked() -> str | None:
    """Return why this interpreter's servers keep the release's middlewares; `None` if all code is as it was checked."""
    for name, digests in CHECKED.items():
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
            noted.write_text(json.dumps(kept))

        return setup

    if (reason := unchecked()) is not None:
        keep("every middleware", reason)
        noted.write_text(json.dumps(kept))
        return
    Server: Any = gym_symbol("SimpleServer")
    replaced = {name: replacement(name, getattr(Server, name)) for name in SETUPS if name in Server.__dict__}
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
