"""Sampling parameters: what a request asks for, and what the trainer set."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logit_bias",
)
"""Body fields of a chat-completions request (vLLM's extras included) that decide what is sampled."""


def requested_sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a chat-completions request, in the engines' names."""
    wanted = {name: request[name] for name in NAMES if request.get(name) is not None}
    if (limit := request.get("max_completion_tokens")) is not None:
        wanted["max_tokens"] = limit
    return wanted


class SamplingGuard:
    """The trainer's sampling parameters; they win, so that what is sampled is what the trainer assumes (on-policy).

    A request that asks for something else is overruled; each parameter is reported once.
    """

    def __init__(self, pinned: Mapping[str, Any]) -> None:
        self.pinned = dict(pinned)
        self._lock = threading.Lock()
        self._reported: set[str] = set()

    @property
    def overruled(self) -> frozenset[str]:
        """Parameters that some request asked for otherwise."""
        return frozenset(self._reported)

    def apply(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """`wanted` with the pinned parameters in place; a smaller `max_tokens` of the request is kept."""
        merged = {**wanted, **self.pinned}
        if "max_tokens" in wanted and "max_tokens" in self.pinned:
            merged["max_tokens"] = min(wanted["max_tokens"], self.pinned["max_tokens"])
        for name, value in self.pinned.items():
            if name != "max_tokens" and name in wanted and wanted[name] != value:
                self._report(name, wanted[name], value)
        return merged

    def _report(self, name: str, wanted: Any, pinned: Any) -> None:
        with self._lock:
            if name in self._reported:
                return
            self._reported.add(name)
        logger.warning(
            "rows ask for %s=%r; the trainer's %r is used instead (reported once)", name, wanted, pinned
        )
