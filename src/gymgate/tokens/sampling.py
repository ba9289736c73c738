"""Sampling parameters: what a request asks for, and what the trainer set."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

logger = logging.getLogger(__name__)

NEUTRAL: Final[Mapping[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
    "seed": None,
}
"""Parameters that shape what is drawn, with the value that leaves it as the model gives it; one seed for all rollouts of a
row would make them all the same."""

ENDING: Final = ("max_tokens", "stop")
"""Parameters that only say where an answer ends."""

NAMES: Final = (*NEUTRAL, *ENDING)
"""Body fields of a chat-completions request (vLLM's extras included) that decide what is sampled."""

_SENT: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that an engine may otherwise take from the model's `generation_config.json`."""


def requested_sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a chat-completions request, in the engines' names."""
    wanted = {name: request[name] for name in NAMES if request.get(name) is not None}
    if (limit := request.get("max_completion_tokens")) is not None:
        wanted["max_tokens"] = limit
    return wanted


class SamplingGuard:
    """The trainer's sampling parameters; they win, so that what is sampled is what the trainer assumes (on-policy).

    Where a trainer pins any, those it does not pin are neutral: a row cannot bring in a `min_p` that the trainer knows nothing
    of. What a row still decides is where its answers end: a smaller `max_tokens`, `stop`. Without pinned parameters
    (an evaluation) the row decides. A request that asks for something else is overruled; each parameter is reported once.
    """

    def __init__(self, pinned: Mapping[str, Any]) -> None:
        self.pinned = {name: value for name, value in pinned.items() if value is not None}
        self._lock = threading.Lock()
        self._reported: set[str] = set()

    @property
    def overruled(self) -> frozenset[str]:
        """Parameters that some request asked for otherwise."""
        return frozenset(self._reported)

    def apply(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """`wanted` with the pinned parameters in place; a smaller `max_tokens` of the request is kept."""
        if not self.pinned:
            return dict(wanted)
        fixed = {**{name: NEUTRAL[name] for name in _SENT}, **self.pinned}
        for name, value in wanted.items():
            if name not in ENDING and not _same(name, value, ours := fixed.get(name, NEUTRAL[name])):
                self._report(name, value, ours)
        merged = {**{name: wanted[name] for name in ENDING if name in wanted}, **fixed}
        if "max_tokens" in wanted and "max_tokens" in fixed:
            merged["max_tokens"] = min(wanted["max_tokens"], fixed["max_tokens"])
        return merged

    def _report(self, name: str, wanted: Any, ours: Any) -> None:
        with self._lock:
            if name in self._reported:
                return
            self._reported.add(name)
        logger.warning(
            "rows ask for %s=%r; the trainer's %r is used instead (reported once)", name, wanted, ours
        )


def _same(name: str, wanted: Any, ours: Any) -> bool:
    """Also true of two ways to write "no top-k"."""
    if name == "top_k":
        return bool(wanted == ours or (wanted <= 0 and ours <= 0))
    return bool(wanted == ours)
