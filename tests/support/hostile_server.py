"""A server that says what a test wants, byte for byte and when it wants, from threads of its own.

The client's event loop may be busy meanwhile, as it is in a daemon under load.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_S = 30.0

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Script = Callable[["Peer"], None]


class Peer:
    """One connection of a client, from the server's side."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.connection = connection
        self.number = number
        """0 for the server's first connection."""
        self._read = b""

    def request(self) -> bytes:
        """Read one request and return its body. Raises `ConnectionError` when the client is gone."""
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, rest = self._read.partition(b"\r\n\r\n")
        lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        length = int(lengths[0]) if lengths else 0
        self._read = rest
        while len(self._read) < length:
            self._more()
        body, self._read = self._read[:length], self._read[length:]
        return body

    def say(self, data: bytes) -> None:
        self.connection.sendall(data)

    def answer(self, body: bytes, head: bytes = b"") -> None:
        self.say(b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))

    def _more(self) -> None:
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionError
        self._read += data


class HostileServer:
    """Plays `script` on every connection, which ends with the script."""

    def __init__(self, script: Script, *, receive_buffer: int | None = None) -> None:
        self.connections = 0
        self._script = script
        self.open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.listener = socket.socket()
        if receive_buffer is not None:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(64)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._start(self._accept)

    def close(self) -> None:
        """End all connections and threads."""
        for each in (self.listener, *self.open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for each in (self.listener, *self.open):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                connection.settimeout(WAIT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.open.append(connection)
                peer = Peer(connection, self.connections)
                self.connections += 1
                self._start(lambda peer=peer: self._play(peer))

    def _play(self, peer: Peer) -> None:
        with contextlib.suppress(OSError):
            self._script(peer)
            peer.connection.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()


@contextmanager
def hostile(script: Script, *, receive_buffer: int | None = None) -> Iterator[HostileServer]:
    """A running `HostileServer`."""
    server = HostileServer(script, receive_buffer=receive_buffer)
    try:
        yield server
    finally:
        server.close()
