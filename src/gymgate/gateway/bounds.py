"""How large a request or an answer may be, on the wire and in memory."""

from __future__ import annotations

import zlib

import aiohttp

MAX_BODY = 128 << 20
"""Bytes of one request, or of one answer of an endpoint once it is inflated."""
MAX_VALUES = 8 << 20
"""Values in one body: one of two bytes takes up to a hundred in memory."""
_SURELY_FEW = 1 << 20
"""Bytes of a body whose values need no counting."""
_GZIP_OR_ZLIB = 47
"""For zlib: which of the two it is shows in the data."""


class TooLargeError(ValueError):
    """A body beyond a bound; the message says which."""


def check_values(raw: bytes) -> None:
    """Raise `TooLargeError` for JSON of too many values, found without parsing it."""
    if len(raw) > _SURELY_FEW and raw.count(b",") + raw.count(b"{") + raw.count(b"[") > MAX_VALUES:
        raise TooLargeError(f"holds more than {MAX_VALUES} values")


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """The body of a response whose session does not inflate, inflated; in pieces, and never more than `MAX_BODY`.

    Raises `TooLargeError`, and `ValueError` for what cannot be inflated.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        inflater = None
    elif encoding in ("gzip", "x-gzip", "deflate"):
        inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    else:
        raise ValueError(f"has Content-Encoding {encoding!r}, although it was asked for none")
    if (response.content_length or 0) > MAX_BODY:
        raise _too_long()
    pieces, left = [], MAX_BODY
    while piece := await response.content.readany():
        if inflater is not None:
            piece = _inflated(inflater, piece, left + 1, encoding)
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise _too_long()
    if inflater is not None and not inflater.eof:
        raise ValueError(f"is not whole: its {encoding} data end too early")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _inflated(inflater: zlib._Decompress, piece: bytes, most: int, encoding: str) -> bytes:
    try:
        return inflater.decompress(piece, most)
    except zlib.error as error:
        raise ValueError(f"is not {encoding}, although its headers say so: {error}") from error


def _too_long() -> TooLargeError:
    return TooLargeError(f"holds more than {MAX_BODY} bytes")
