"""The model hub: find out whether it answers, and do without it if it does not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from gymgate.core.errors import ConfigError
from gymgate.core.http_client import HTTPClient, HTTPFailure, Request, UnreachableError

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
    """Return why there is no answer in time; `None` if there is one."""
    failures: SimpleQueue[str | None] = SimpleQueue()
    # In a thread, because resolving a host name has no deadline of its own.
    Thread(target=lambda: asyncio.run(_ask(url, failures)), daemon=True).start()
    try:
        return failures.get(timeout=TIMEOUT_S)
    except Empty:
        return _silence()


def _silence() -> str:
    return f"nothing within {TIMEOUT_S:g} s"


async def _ask(url: str, failures: SimpleQueue[str | None]) -> None:
    failure = None
    try:
        async with HTTPClient() as client:
            answer = await client.send(Request(url, method="GET"), timeout_s=TIMEOUT_S)
        if answer.status in _RETRIED:
            failure = f"HTTP {answer.status}"
    except UnreachableError as error:
        if error.retryable:  # an unknown certificate is an answer: the hub's client decides what to trust
            failure = str(error)
    except TimeoutError:
        failure = _silence()
    except (HTTPFailure, ValueError) as error:
        failure = str(error) or type(error).__name__
    failures.put(failure)
