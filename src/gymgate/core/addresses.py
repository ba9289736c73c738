"""User and password in the address of a server: taken out where the address enters, so that no message or file shows them."""

from __future__ import annotations

import base64
import re
from urllib.parse import quote, unquote, urlsplit

_LOGIN = re.compile(r"(?<=//)[^/?#\s]+@")


def without_login(text: str) -> str:
    """Return a text without the user and password of the URLs in it."""
    return _LOGIN.sub("", text)


def masked_address(text: str) -> str:
    """Return a text that may be no URL without what stands before its last `@`, which may be a password."""
    _, at, rest = text.rpartition("@")
    return f"***@{rest}" if at else text


def split_login(url: str) -> tuple[str, str | None]:
    """Return a URL without user and password, and these as `user:password`, decoded; `None` where it has none."""
    address = without_login(url)
    if address == url:
        return url, None
    parts = urlsplit(url)
    return address, f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"


def refuse_broken_login(url: str) -> None:
    """Raise `ValueError`, without the text, for a URL whose password would be taken for a part of the address and shown."""
    host, at, _ = without_login(url).partition("@")
    if at and not re.fullmatch(r"https?://([^/?#:\s]+|\[[\da-fA-F:.]+\])(:\d*)?([/?#]\S*)?", host):
        raise ValueError(
            "not a URL; write http://USER:PASSWORD@host:8000/v1, and / ? # @ in them as %2F %3F %23 %40"
        )


def basic_authorization(login: str) -> str:
    """Return the value of the header `Authorization` for `user:password` (RFC 7617)."""
    return f"Basic {base64.b64encode(login.encode()).decode()}"


def secrets_of_login(login: str) -> list[str]:
    """Return what to mask in a text of a server that was told `user:password`: each, also as it is written in an address, and
    both as they were sent. A token may stand in the user's place."""
    user, _, password = login.partition(":")
    written = [quote(text, safe="") for text in (password, user)]
    return [password, user, *written, basic_authorization(login).partition(" ")[2]]
