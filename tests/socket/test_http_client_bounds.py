"""What an answer may cost, however it is made: memory, time, and the wait of a call to somebody else."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from support.hostile_server import Peer, hostile

PROGRAM = Path(__file__).with_name("bystander_program.py")
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BLOCK = 1 << 20


def trailers() -> Iterator[bytes]:
    yield CHUNKED + b"2\r\n{}\r\n0\r\n"
    number = itertools.count()
    for _ in range(120):
        yield b"".join(b"X-%d: y\r\n" % next(number) for _ in range(BLOCK // 14))
    yield b"\r\n"


def one_trailer() -> Iterator[bytes]:
    yield CHUNKED + b"2\r\n{}\r\n0\r\nX: "
    yield from itertools.repeat(b"x" * BLOCK, 120)
    yield b"\r\n\r\n"


def small_chunks() -> Iterator[bytes]:
    yield CHUNKED
    yield from itertools.repeat(b"2\r\n  \r\n" * (BLOCK // 7), 400)
    yield b"2\r\n{}\r\n0\r\n\r\n"


def chunk_extensions() -> Iterator[bytes]:
    yield CHUNKED + b"2;x="
    yield from itertools.repeat(b"x" * BLOCK, 120)
    yield b"\r\n{}\r\n0\r\n\r\n"


def interim_answers() -> Iterator[bytes]:
    yield from itertools.repeat(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * (BLOCK // 37), 120)
    yield HEAD + b"Content-Length: 2\r\n\r\n{}"


def bomb() -> Iterator[bytes]:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    body = b"".join([*(packer.compress(b" " * BLOCK) for _ in range(448)), packer.flush()])
    yield HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def answer(status: bytes, start: bytes, middle: bytes, end: bytes) -> Iterator[bytes]:
    """An answer of 120 MiB of JSON; `middle` is repeated."""
    times = BLOCK // len(middle)
    size = len(start) + 120 * times * len(middle) + len(end)
    yield b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, size, start)
    yield from itertools.repeat(middle * times, 120)
    yield end


def refusal_of_many_values() -> Iterator[bytes]:
    return answer(b"400 Bad Request", b"[", b"[],", b"0]")


def refusal_of_many_words() -> Iterator[bytes]:
    return answer(b"400 Bad Request", b'{"error": "', b"a ", b'"}')


def many_values(end: bytes) -> Iterator[bytes]:
    """A quarter of the values that are allowed, and one at the end that orjson does not read."""
    body = b"[" + b'{"a":1},' * (1 << 20) + end + b"]"
    yield HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def many_values_and_nan() -> Iterator[bytes]:
    return many_values(b"NaN")


def many_values_and_a_long_integer() -> Iterator[bytes]:
    return many_values(b"1" * 30)


Attack = Callable[[], Iterable[bytes]]
MIB: dict[Attack, int] = {
    trailers: 40,
    one_trailer: 40,
    small_chunks: 40,
    chunk_extensions: 40,
    interim_answers: 40,
    bomb: 200,
    refusal_of_many_values: 400,
    refusal_of_many_words: 700,
    many_values_and_nan: 400,
    many_values_and_a_long_integer: 400,
}
"""What each may cost. The last one ends at `http_client.MAX_BODY`."""


@pytest.mark.parametrize("attack", MIB)
def test_an_answer_is_bounded_and_holds_up_nobody(attack: Attack) -> None:
    answer = iter(attack())
    first = next(answer)

    def script(peer: Peer) -> None:
        while peer.request() != b'"attack"':
            peer.answer(b"{}")
        peer.say(first)
        for data in answer:
            peer.say(data)
        peer.request()

    with hostile(script) as server:
        command = [sys.executable, str(PROGRAM), server.url]
        output = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    outcome = json.loads(output)
    assert outcome["error"] is not None
    assert outcome["mib"] < MIB[attack]
    assert outcome["longest_hold_s"] < 2  # one on a slow machine
