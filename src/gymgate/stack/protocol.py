"""Both ends of the connection between an SDK process and its stack's daemon.

A frame is a 4-byte little-endian length and one JSON object:

    {"id": 1, "call": "run", "with": {...}}     answered by {"id": 1, "ok": ...} or {"id": 1, "error": {...}}
    {"cancel": 1}                               the caller gave up on its call 1
    {"tell": "progress", "with": {...}}         needs no answer

Either end may call the other, any number of calls at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import orjson

from gymgate.errors import DataError, GymgateError, StackLostError, from_wire

PROTOCOL = 2
"""Both ends must have the same; it changes with the frames' meaning."""
_LENGTH = struct.Struct("<I")
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY

Handler = Callable[[dict[str, Any]], Awaitable[Any]]
Listener = Callable[[dict[str, Any]], None]

logger = logging.getLogger(__name__)


class Peer(asyncio.Protocol):
    """One end of a connection. Belongs to the event loop that made it.

    `handlers` answer the other end's calls, each in a task of its own that is cancelled when the other end
    cancels the call or goes away. `listeners` get what it tells.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler] | None = None,
        listeners: Mapping[str, Listener] | None = None,
        on_lost: Callable[[], None] = lambda: None,
        describe_loss: Callable[[], str] = lambda: "the stack's daemon is gone",
    ) -> None:
        self.handlers = dict(handlers or {})
        self.listeners = dict(listeners or {})
        self.lost = asyncio.Event()
        self.heard = 0
        """How often anything came from the other end."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """The other end's calls under way."""
        self.describe_loss = describe_loss
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0

    async def call(self, method: str, **parameters: Any) -> Any:
        """The other end's answer. Cancelling it cancels the work there.

        Raises the error that the other end raised, `StackLostError` if it goes away, and `DataError` for
        parameters that JSON cannot hold.
        """
        self._next_id += 1
        number = self._next_id
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            self._send({"id": number, "call": method, "with": parameters})
            return await answer
        except asyncio.CancelledError:
            self._send({"cancel": number}, lost_ok=True)
            raise
        finally:
            del self._pending[number]

    def tell(self, what: str, **parameters: Any) -> None:
        """Say something that needs no answer; nothing happens if nobody is there."""
        self._send({"tell": what, "with": parameters}, lost_ok=True)

    @property
    def waits(self) -> bool:
        """Whether a call of this end has no answer yet."""
        return bool(self._pending)

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def sock(self) -> socket.socket | None:
        """The connection's socket, if it is open."""
        return self._transport.get_extra_info("socket") if self._transport is not None else None

    @property
    def peer_pid(self) -> int | None:
        """Process that made the connection, as the kernel knows it; `None` if it cannot tell."""
        if (sock := self.sock) is None:
            return None
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid if pid > 0 and pid != os.getpid() else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self.lost.set()
        for task in self.tasks.values():
            task.cancel()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(StackLostError(self.describe_loss()))
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.heard += 1
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + 4 + length
            if len(buffer) < end:
                break
            frame = orjson.loads(memoryview(buffer)[start + 4 : end])
            start = end
            self._handle(frame)
        if start:
            del buffer[:start]

    def _send(self, frame: dict[str, Any], *, lost_ok: bool = False) -> None:
        if self._transport is None:
            if lost_ok:
                return
            raise StackLostError(self.describe_loss())
        try:
            body = orjson.dumps(frame, option=_OPTIONS)
        except TypeError as error:
            raise DataError(f"cannot be sent as JSON: {error}") from None
        self._transport.writelines((_LENGTH.pack(len(body)), body))

    def _handle(self, frame: dict[str, Any]) -> None:
        if "call" in frame:
            number = frame["id"]
            task = asyncio.create_task(self._answer(number, frame["call"], frame["with"]))
            self.tasks[number] = task
            task.add_done_callback(lambda _: self.tasks.pop(number, None))
        elif "cancel" in frame:
            if (cancelled := self.tasks.get(frame["cancel"])) is not None:
                cancelled.cancel()
        elif "tell" in frame:
            if (listener := self.listeners.get(frame["tell"])) is not None:
                listener(frame["with"])
        elif (answer := self._pending.get(frame["id"])) is not None and not answer.done():
            if "error" in frame:
                answer.set_exception(from_wire(frame["error"]))
            else:
                answer.set_result(frame["ok"])

    async def _answer(self, number: int, method: str, parameters: dict[str, Any]) -> None:
        try:
            frame = {"id": number, "ok": await self.handlers[method](parameters)}
        except GymgateError as error:
            frame = {"id": number, "error": error.to_wire()}
        except Exception as error:
            logger.exception("%s failed", method)
            message = f"{method} failed inside gymgate: {type(error).__name__}: {error}"
            frame = {"id": number, "error": GymgateError(message).to_wire()}
        self._send(frame, lost_ok=True)
