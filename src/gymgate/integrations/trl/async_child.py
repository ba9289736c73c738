"""The process that rolls out while the trainer trains."""

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
from typing import Any

from gymgate.errors import GymgateError, StackLostError
from gymgate.integrations.training.attempts import Attempts
from gymgate.integrations.trl.async_plan import Channels, Plan, now
from gymgate.integrations.trl.async_samples import group_figures, sample_class, to_samples
from gymgate.integrations.trl.failures import FailureWatch
from gymgate.integrations.trl.policy import TrainersEngine, made_by, renderer_for, served_model
from gymgate.tokens import Engine, TokenPolicy

logger = logging.getLogger(__name__)

TICK_S = 0.2
END_S = 5.0
"""For an orderly end when the trainer is gone; an import or a call that takes longer is not waited for."""
FULL_S = 0.05
"""Between looks at a queue that is full."""
SPARE_GROUPS = 2
"""Groups under way beyond those that can run at once, so that a slow rollout leaves no gap."""
_ACCELERATORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def child_main(plan: bytes, channels: Channels) -> None:
    """Entry point of the process; `plan` is a pickled `Plan`."""
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    os.environ.update(dict.fromkeys(_ACCELERATORS, ""))
    for name in _RANKS:
        os.environ.pop(name, None)
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # the trainer's, which stops this process; children keep the default
    try:
        asyncio.run(_until_told(pickle.loads(plan), channels))
    except BaseException as error:
        traceback.print_exc()
        _tell(error, channels)
    finally:
        for waiting in (channels.samples, channels.metrics, channels.delivered):
            waiting.cancel_join_thread()  # nobody may read them any more


def _end_with_trainer() -> None:
    """Whatever this process is at; its stack goes with it."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        time.sleep(END_S)
        os._exit(1)


def _tell(error: BaseException, channels: Channels) -> None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, GymgateError):
        error = StackLostError(f"the rollouts' process failed: {type(error).__name__}: {error}")
    channels.failure.put(error.to_wire())
    channels.failed.set()


async def _until_told(plan: Plan, channels: Channels) -> None:
    """Roll out until the trainer says stop or is gone."""
    producer = Producer(plan, channels)
    working = asyncio.create_task(producer.run())
    parent = multiprocessing.parent_process()
    while not working.done() and not channels.stop.is_set() and (parent is None or parent.is_alive()):
        channels.heartbeat.value = now()
        await asyncio.wait([working], timeout=TICK_S)
    if not working.done():
        working.cancel()
        await asyncio.wait([working])
    if not working.cancelled():
        working.result()


class Producer:
    """Groups of rollouts, one per row, over and over the dataset."""

    def __init__(self, plan: Plan, channels: Channels) -> None:
        self.plan = plan
        self.channels = channels
        self.spec = plan.spec
        self.attempts = Attempts(self.spec.config, self.spec.limits)
        self.watch = FailureWatch(batch=max(plan.concurrency, plan.group_size))
        self.engine: Engine | None = None
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._groups = asyncio.Semaphore(math.ceil(plan.concurrency / plan.group_size) + SPARE_GROUPS)
        self._delivering = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled; raises what makes it impossible to go on."""
        try:
            policy = await asyncio.to_thread(self._policy)
            await asyncio.gather(self.attempts.start(), asyncio.to_thread(sample_class))
            async with asyncio.TaskGroup() as groups:
                for group_id in itertools.count():
                    await self._groups.acquire()
                    groups.create_task(self._group(group_id, policy))
        finally:
            if isinstance(self.engine, TrainersEngine):
                await self.engine.close()
            await asyncio.shield(self.attempts.close())

    def _policy(self) -> TokenPolicy:
        url, limit = self.plan.base_url, None
        self.engine = made_by(self.spec.engine, None, "generate")
        if self.engine is None:
            model, limit = served_model(url)
            self.engine = TrainersEngine(url, model, self._version, lora_name=self.plan.lora_name)
        return TokenPolicy(
            self.engine,
            renderer_for(self.plan.tokenizer, self.spec.renderer, self.plan.chat_template_kwargs),
            sampling=self.plan.sampling,
            max_model_len=limit,
            max_completion_len=self.plan.max_completion_len,
            version=self._version,
        )

    def _version(self) -> int:
        return int(self.channels.version.value)

    async def _group(self, group_id: int, policy: TokenPolicy) -> None:
        position = self.plan.position + group_id
        record = self.spec.train_dataset[position % len(self.spec.train_dataset)]
        environment, row = self.spec.row(record["prompt"])
        version = self._version()
        rollouts = (self._rollout(environment, row, policy) for _ in range(self.plan.group_size))
        attempts = await asyncio.gather(*rollouts)
        self.watch.see(attempts)
        samples = to_samples(
            attempts,
            group_id=group_id,
            version=version,
            prompt=[{"role": message["role"], "content": message["content"]} for message in record["prompt"]],
            decode=lambda ids: str(self.plan.tokenizer.decode(ids, skip_special_tokens=True)),
            score_truncated=self.spec.score_truncated,
        )
        self._log(group_figures(attempts, environment))
        async with (
            self._delivering
        ):  # a group's samples stand together, in the order that the trainer hears of
            for sample in samples:
                await self._deliver(sample)
            self.channels.delivered.put(group_id)
        await asyncio.sleep(self.watch.pause_s)
        self._groups.release()

    async def _rollout(self, environment: str, row: Mapping[str, Any], policy: TokenPolicy) -> Any:
        async with self._slots:
            return await self.attempts.attempt(environment, row, policy)

    async def _deliver(self, sample: Any) -> None:
        """Waits while the trainer has more samples than it wants."""
        while True:
            try:
                sample.enqueued_at = time.time()  # the trainer subtracts it from its own
                return self.channels.samples.put_nowait(sample)
            except queue.Full:
                await asyncio.sleep(FULL_S)

    def _log(self, figures: dict[str, tuple[float, float]]) -> None:
        try:
            self.channels.metrics.put_nowait(figures)
        except queue.Full:
            logger.debug("the trainer reads no metrics; a group's are dropped")
