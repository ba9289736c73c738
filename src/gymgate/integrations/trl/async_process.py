"""The process that runs rollouts while the trainer trains."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from typing import TYPE_CHECKING, Any

from gymgate.core.errors import ConfigError, GymgateError, StackLostError, described
from gymgate.core.task_groups import task_group
from gymgate.integrations.training.rollouts import FailureGuard, RolloutRunner, SampledRollout
from gymgate.integrations.trl.batch import group_metrics, sample_class, to_samples
from gymgate.integrations.trl.engine import TRLServerEngine, server_policy
from gymgate.tokens import Engine, TokenPolicy

if TYPE_CHECKING:
    from gymgate.integrations.trl.spec import NeMoGymSpec

logger = logging.getLogger(__name__)

TICK_S = 0.2
"""Between looks at whether the trainer has stopped this process or has ended."""
SHUTDOWN_S = 5.0
"""For an orderly end after the trainer ended; an import or a call that takes longer is cut off."""
FULL_QUEUE_S = 0.05
"""Between attempts to put a sample into a full queue."""
SPARE_GROUPS = 2
"""Groups started beyond those that can run at once, so that a slow rollout leaves no gap."""
MAX_QUEUED_METRICS = 4096
"""Metrics of groups that wait for the trainer; more are dropped, so that logging never blocks rollouts."""
_ACCELERATORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ProcessSettings:
    """The work of the process, and how it samples. Sent to it as a pickle."""

    spec: NeMoGymSpec
    tokenizer: Any
    base_url: str
    """The vLLM server."""
    sampling: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, Any] | None
    group_size: int
    concurrency: int
    """Concurrent rollouts."""
    max_completion_len: int
    position: int
    """First row to run, counted over all passes through the dataset."""
    lora_name: str | None
    """See `TRLServerEngine`."""

    def pickled(self) -> bytes:
        """Return the pickle. Raises `ConfigError` for an engine or renderer that cannot be pickled."""
        try:
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"rollouts run in a separate process, but this cannot be pickled: {error};"
                " give engine and renderer as objects or functions of a module, not as lambdas"
            ) from error


class Channels:
    """Queues and values that trainer and process share."""

    def __init__(self, context: SpawnContext, max_samples: int) -> None:
        self.samples: multiprocessing.Queue[Any] = context.Queue(max(0, max_samples))
        self.metrics: multiprocessing.Queue[dict[str, Any]] = context.Queue(MAX_QUEUED_METRICS)
        self.delivered: multiprocessing.Queue[tuple[int, int]] = context.Queue()
        """Groups, each with the number of its samples, in the order of the samples in the queue; some have none."""
        self.failure: multiprocessing.Queue[dict[str, Any]] = context.Queue(1)
        self.stop = context.Event()
        self.failed = context.Event()
        self.version = context.Value("q", 0)
        self.heartbeat = context.Value("d", 0.0)
        """When the process last reported, in seconds of `time.monotonic`, which Linux counts once per machine; 0 before that."""


def process_main(settings: bytes, channels: Channels) -> None:
    """Entry point of the process; `settings` are pickled `ProcessSettings`."""
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    os.environ.update(dict.fromkeys(_ACCELERATORS, ""))
    for name in _RANKS:
        os.environ.pop(name, None)
    # Ctrl-C reaches the trainer too, which then stops this process. A handler, unlike SIG_IGN, is not inherited.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        asyncio.run(_run_until_stopped(pickle.loads(settings), channels))
    except BaseException as error:
        traceback.print_exc()
        if not isinstance(error, GymgateError):
            error = StackLostError(f"the rollout process failed: {described(error)}")
        channels.failure.put(error.to_wire())
        channels.failed.set()
    finally:
        for unread in (channels.samples, channels.metrics, channels.delivered):
            unread.cancel_join_thread()


def _end_with_trainer() -> None:
    """End this process `SHUTDOWN_S` after the trainer's, even if it is stuck; its stack ends with it."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        time.sleep(SHUTDOWN_S)
        os._exit(1)


async def _run_until_stopped(settings: ProcessSettings, channels: Channels) -> None:
    """Run rollouts until the trainer says stop, or ends."""
    producing = asyncio.create_task(Producer(settings, channels).run())
    parent = multiprocessing.parent_process()
    while not producing.done() and not channels.stop.is_set() and (parent is None or parent.is_alive()):
        channels.heartbeat.value = time.monotonic()
        await asyncio.wait([producing], timeout=TICK_S)
    if not producing.done():
        producing.cancel()
        await asyncio.wait([producing])
    if not producing.cancelled():
        producing.result()


class Producer:
    """Runs one group of rollouts per row, over the dataset again and again, and delivers their samples."""

    def __init__(self, settings: ProcessSettings, channels: Channels) -> None:
        self.settings = settings
        self.channels = channels
        self.spec = settings.spec
        self.guard = FailureGuard(batch_size=max(settings.concurrency, settings.group_size))
        self.runner = RolloutRunner(self.spec.settings.stack, self.spec.settings.limits, self.guard)
        self.engine: Engine | None = None
        running_groups = math.ceil(settings.concurrency / settings.group_size)
        self._group_limit = asyncio.Semaphore(running_groups + SPARE_GROUPS)
        self._rollout_limit = asyncio.Semaphore(settings.concurrency)
        self._delivery = asyncio.Lock()

    async def run(self) -> None:
        """Run until cancelled. Raises the error of a first start that fails, and those of `FailureGuard`."""
        try:
            policy = await asyncio.to_thread(self._policy)
            self.engine = policy.engine
            await asyncio.gather(self.runner.start(), asyncio.to_thread(sample_class))
            async with task_group() as groups:
                for group_id in itertools.count():
                    await self._group_limit.acquire()
                    groups.create_task(self._group(group_id, policy))
        finally:
            if isinstance(self.engine, TRLServerEngine):
                await self.engine.close()
            await asyncio.shield(self.runner.close())

    def _policy(self) -> TokenPolicy:
        settings = self.settings
        return server_policy(
            self.spec,
            settings.tokenizer,
            settings.base_url,
            sampling=settings.sampling,
            chat_template_kwargs=settings.chat_template_kwargs,
            max_completion_len=settings.max_completion_len,
            version=self._version,
            lora_name=settings.lora_name,
        )

    def _version(self) -> int:
        return int(self.channels.version.value)

    async def _group(self, group_id: int, policy: TokenPolicy) -> None:
        position = self.settings.position + group_id
        record = self.spec.train_dataset[position % len(self.spec.train_dataset)]
        environment, row = self.spec.row(record["prompt"])
        version = self._version()

        async def run() -> SampledRollout:
            async with self._rollout_limit:
                return await self.runner.run(environment, row, policy.conversation())

        rollouts = await asyncio.gather(*(run() for _ in range(self.settings.group_size)))
        self.guard.check([sampled.rollout.error for sampled in rollouts])
        samples = to_samples(
            rollouts,
            group_id=group_id,
            version=version,
            prompt=[{"role": message["role"], "content": message["content"]} for message in record["prompt"]],
            decode=lambda ids: str(self.settings.tokenizer.decode(ids, skip_special_tokens=True)),
            score_truncated=self.spec.settings.score_truncated,
            weights=self.spec.settings.weights,
        )
        try:
            self.channels.metrics.put_nowait(group_metrics(rollouts, environment))
        except queue.Full:
            logger.debug("the trainer reads no metrics; those of group %d are dropped", group_id)
        async with self._delivery:  # samples of a group stay together, groups in the order of `delivered`
            for sample in samples:
                await self._deliver(sample)
            self.channels.delivered.put((group_id, len(samples)))
        await asyncio.sleep(self.guard.pause_s)  # with its place kept, so that no group starts instead
        self._group_limit.release()

    async def _deliver(self, sample: Any) -> None:
        """Put a sample into the queue; wait while that is full."""
        while True:
            try:
                sample.enqueued_at = time.time()  # the trainer subtracts it from its own clock
                return self.channels.samples.put_nowait(sample)
            except queue.Full:
                await asyncio.sleep(FULL_QUEUE_S)
