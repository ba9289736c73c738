"""A report over HTTP on loopback: a page, and a stream of events that tells each browser what changed since its last one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from gymgate.core import codec
from gymgate.core.http_client import is_for_loopback
from gymgate.results.growing import GrowingReport
from gymgate.results.page import keyed, page

EVENTS = "/events"
POLL_S = 1.0
"""Seconds between two looks for changes of the run's files, at least."""
SHARE = 10
"""Reading the run and making its page is followed by a pause this many times as long, so that a large run costs a tenth of a
core: a page each 10 to 20 s for 10,000 rollouts of 16 kB, which take one or two to read."""
STOP_S = 0.5
"""Seconds that open event streams have to end."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_logger = logging.getLogger("gymgate.view.http")
_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage)))
"""Does not log malformed requests; their sender gets an error."""
Pieces = list[tuple[str, bytes]]
"""Parts of a page as JSON, by key and in order."""


class VersionedPage:
    """A page as it changes: of each part the last content, and the version in which it got that."""

    def __init__(self) -> None:
        self.version = 0
        self._title = ""
        self._order = 0
        """The version in which parts came, went or moved."""
        self._parts: dict[str, tuple[int, bytes]] = {}

    def update(self, title: str, pieces: Pieces) -> None:
        """Take the page's new content."""
        version, before = self.version + 1, self._parts
        parts = {
            key: known if (known := before.get(key, (0, b"")))[1] == content else (version, content)
            for key, content in pieces
        }
        if [*parts] != [*before]:
            self._order = version
        if self._order == version or title != self._title or parts != before:
            self.version, self._title, self._parts = version, title, parts

    def since(self, version: int) -> bytes:
        """Return what differs from the page of a version, as JSON: `keys` are all parts in order, if that changed."""
        changed = {
            key: codec.Verbatim(content) for key, (since, content) in self._parts.items() if since > version
        }
        order = {"keys": [*self._parts]} if self._order > version else {}
        return codec.dumps({"title": self._title, **order, "parts": changed})


class ReportView:
    """Serves a report that grows."""

    def __init__(self, report: GrowingReport) -> None:
        self._report = report
        self._page = VersionedPage()
        self._changed = asyncio.Event()
        self._session = secrets.token_hex(4)
        """Tells the versions of this process from those of an earlier one at the same port."""
        self._ending = False

    async def serve(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        """Serve until this is cancelled; `ready` is called once. Raises what ends the reading of the run."""
        loop = asyncio.get_running_loop()
        server = web.Server(self._answer, access_log=None, logger=_logger, handler_cancellation=True)
        listening = await loop.create_server(server, sock=listener)
        ended: asyncio.Future[None] = loop.create_future()
        stop = threading.Event()
        # A thread that nobody waits for: a large run may take it seconds to come to an end.
        threading.Thread(target=self._follow, args=(ended, stop), name="gymgate-view", daemon=True).start()
        try:
            ready()
            await ended
        finally:
            stop.set()
            self._ending = True
            self._changed.set()
            listening.close()
            server.pre_shutdown()
            await server.shutdown(STOP_S)

    def _follow(self, ended: asyncio.Future[None], stop: threading.Event) -> None:
        """Read the run whenever its files changed, and publish its page, until told to stop."""
        loop, stamp = ended.get_loop(), None

        def in_loop(call: Callable[..., object], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody looks any more
                loop.call_soon_threadsafe(call, *arguments)

        try:
            while not stop.is_set():
                began = time.monotonic()
                # Taken before the reading, so that what is written meanwhile is read next time.
                if (current := self._report.stamp()) != stamp:
                    stamp = current
                    title, parts = self._report.parts()
                    in_loop(self._publish, title, [(key, codec.dumps(part)) for key, part in keyed(parts)])
                stop.wait(max(POLL_S, SHARE * (time.monotonic() - began)))
        except Exception as error:
            in_loop(_fail, ended, error)

    def _publish(self, title: str, pieces: Pieces) -> None:
        self._page.update(title, pieces)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        # Another site's page can reach this port under a name of its own that it had resolved to 127.0.0.1.
        if not is_for_loopback(request.headers.get("Host", "")):
            return web.Response(status=421, text="gymgate view answers at localhost only\n", headers=HEADERS)
        if request.method != "GET" or request.path not in ("/", EVENTS):
            return web.Response(status=404, text="not found\n", headers=HEADERS)
        if request.path == EVENTS:
            return await self._send_events(request)
        content = page(str(self._report.path), (), events=EVENTS)
        return web.Response(body=content, content_type="text/html", charset="utf-8", headers=HEADERS)

    async def _send_events(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send what changed, whenever the browser has taken what was sent before: it holds at most one page up."""
        session, _, version = (
            request.headers.get("Last-Event-ID") or request.query.get("since", "")
        ).partition("-")
        seen = int(version) if session == self._session and re.fullmatch(r"[0-9]{1,18}", version) else 0
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        while not self._ending:
            changed = self._changed
            if self._page.version > seen:
                content, seen = self._page.since(seen), self._page.version
                await response.write(b"id: %s-%d\ndata: %s\n\n" % (self._session.encode(), seen, content))
            else:
                await changed.wait()
        return response


def _fail(ended: asyncio.Future[None], error: Exception) -> None:
    if not ended.done():
        ended.set_exception(error)
