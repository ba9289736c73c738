"""What crosses from the trainer's process to that of the rollouts: a plan, pickled, and the channels between the two."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from typing import TYPE_CHECKING, Any

from gymgate.errors import ConfigError

if TYPE_CHECKING:
    from gymgate.integrations.trl.spec import NeMoGymSpec

METRICS_WAITING = 4096
"""Groups' figures that wait for the trainer; further ones are dropped, so that logging never holds rollouts."""


def now() -> float:
    """Seconds of a clock that every process of a machine reads alike, and that nobody sets (Linux's CLOCK_MONOTONIC)."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class Plan:
    """What to roll out, and how to sample."""

    spec: NeMoGymSpec
    tokenizer: Any
    base_url: str
    """Of the vLLM server."""
    sampling: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, Any] | None
    group_size: int
    concurrency: int
    """Rollouts at once."""
    max_completion_len: int
    position: int
    """Row to start at, counted over all passes."""
    lora_name: str | None
    """Where TRL publishes an adapter, the name it does so under, without its version."""

    def pickled(self) -> bytes:
        """`ConfigError` for what cannot be sent to another process."""
        try:
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"rollouts run in a process of their own, but this cannot be pickled: {error};"
                " give engine and renderer as objects or functions of a module, not as lambdas"
            ) from error


class Channels:
    """Queues and shared values."""

    def __init__(self, context: SpawnContext, samples_waiting: int) -> None:
        self.samples: multiprocessing.Queue[Any] = context.Queue(max(0, samples_waiting))
        self.metrics: multiprocessing.Queue[dict[str, Any]] = context.Queue(METRICS_WAITING)
        self.failure: multiprocessing.Queue[dict[str, Any]] = context.Queue(1)
        self.stop = context.Event()
        self.failed = context.Event()
        self.version = context.Value("q", 0)
        self.heartbeat = context.Value("d", 0.0)
        """Seconds of `now`, when the process last showed life; 0 before that."""
        self.delivered: multiprocessing.Queue[int] = context.Queue()
        """Groups by number, in the order in which their samples came into the queue; those that gave none, too."""
