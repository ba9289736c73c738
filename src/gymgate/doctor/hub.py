"""The model hub: whether it answers, and doing without it where it does not."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from gymgate.errors import ConfigError

TIMEOUT_S = 5.0
_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")
_RETRIED = (429, 500, 502, 503, 504)
"""Answers after which the hub's client asks again."""


@contextmanager
def hub_or_cache(model: str) -> Iterator[str]:
    """While it is open, the hub's client reads its cache alone if the hub does not answer for `model` within
    `TIMEOUT_S`: it would ask six times for every file, a minute or more. Gives why the hub is not asked; empty if it
    is, or `model` is no name of the hub's. Raises `ConfigError` if the cache has nothing either.
    """
    from huggingface_hub import constants

    was = constants.HF_HUB_OFFLINE
    if was or Path(model).is_dir() or not _NAME.fullmatch(model):
        yield ""
        return
    reason = _unanswered(f"{constants.ENDPOINT}/{model}/resolve/main/config.json")
    told = f"the model hub at {constants.ENDPOINT} does not answer: {reason}" if reason else ""
    if told and not _cached(model):  # nor need the libraries that load models be imported, which takes long
        raise no_model(model, told)
    constants.HF_HUB_OFFLINE = bool(told)
    try:
        yield told
    finally:
        constants.HF_HUB_OFFLINE = was


def no_model(model: str, reason: str) -> ConfigError:
    """The error for a model that is not to be had."""
    return ConfigError(f"no model or tokenizer of {model!r} ({reason}); name its directory: --model DIR")


def _cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(model, name), str) for name in _FILES)


def _unanswered(url: str) -> str | None:
    """Why there is no answer in time, as far as is known; `None` if there is one."""
    told: SimpleQueue[str | None] = SimpleQueue()
    Thread(
        target=lambda: told.put(_ask(url)), daemon=True
    ).start()  # a name's look-up has no deadline of its own
    try:
        return told.get(timeout=TIMEOUT_S)
    except Empty:
        return f"nothing within {TIMEOUT_S:g} s"


def _ask(url: str) -> str | None:
    try:
        with urlopen(Request(url, method="HEAD"), timeout=TIMEOUT_S):
            return None
    except HTTPError as error:
        with error:
            return f"HTTP {error.code}" if error.code in _RETRIED else None
    except URLError as error:  # somebody's certificate is an answer: what to trust is the client's to say
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (OSError, HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
