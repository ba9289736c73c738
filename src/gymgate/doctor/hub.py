"""The model hub: find out whether it answers, and do without it if it does not."""

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

from gymgate.core.errors import ConfigError

TIMEOUT_S = 5.0
_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")
_RETRIED = (429, 500, 502, 503, 504)
"""Statuses after which the hub's client asks again."""


@contextmanager
def hub_or_cache(model: str) -> Iterator[str]:
    """Let the hub's client read only its cache meanwhile, if the hub does not answer for `model` within `TIMEOUT_S`.

    (The client would ask six times for every file, for more than a minute.) Gives the reason why the hub is not asked;
    empty if it is, or if `model` is not a name on the hub. Raises `ConfigError` if the cache does not have it either.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    before = constants.HF_HUB_OFFLINE
    if before or Path(model).is_dir() or not _NAME.fullmatch(model):
        yield ""
        return
    failure = _failure(f"{constants.ENDPOINT}/{model}/resolve/main/config.json")
    reason = f"the model hub at {constants.ENDPOINT} does not answer: {failure}" if failure else ""
    if reason and not any(isinstance(try_to_load_from_cache(model, name), str) for name in _FILES):
        raise no_model(model, reason)  # before the slow import of the libraries that load models
    constants.HF_HUB_OFFLINE = bool(reason)
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE = before


def no_model(model: str, reason: str) -> ConfigError:
    """The error for a model that cannot be loaded."""
    return ConfigError(
        f"cannot load a model or tokenizer {model!r} ({reason}); give its directory: --model DIR"
    )


def _failure(url: str) -> str | None:
    """Why there is no answer in time; `None` if there is one."""
    failures: SimpleQueue[str | None] = SimpleQueue()
    # In a thread, because resolving a host name has no deadline of its own.
    Thread(target=lambda: failures.put(_ask(url)), daemon=True).start()
    try:
        return failures.get(timeout=TIMEOUT_S)
    except Empty:
        return f"nothing within {TIMEOUT_S:g} s"


def _ask(url: str) -> str | None:
    try:
        with urlopen(Request(url, method="HEAD"), timeout=TIMEOUT_S):
            return None
    except HTTPError as error:
        with error:
            return f"HTTP {error.code}" if error.code in _RETRIED else None
    except URLError as error:  # an unknown certificate is an answer: the hub's client decides what to trust
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (OSError, HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
