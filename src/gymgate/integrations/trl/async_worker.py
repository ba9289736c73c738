"""`RolloutWorker`: the trainer's side of asynchronous rollouts (contract: trl 1.15 and 1.16, `RolloutWorkerProtocol`)."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import time
from typing import TYPE_CHECKING, Any

from gymgate.core.errors import ConfigError, StackLostError, from_wire
from gymgate.integrations.trl.async_process import Channels, ProcessSettings, process_main
from gymgate.integrations.trl.engine import tokenizer_of, trainer_sampling

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from gymgate.integrations.trl.spec import NeMoGymSpec

START_TIMEOUT_S = 300.0
"""For the start of the process, imports included."""
STOP_TIMEOUT_S = 30.0
"""For the process to release the stack before it is killed."""


class RolloutWorker:
    """Rollouts in a process of their own, for `AsyncGRPOTrainer(rollout_worker=...)`. Made by `NeMoGymSpec.rollout_worker`.

    The process hides the accelerators, connects to the stack and samples at `args.vllm_server_base_url`. It puts one
    sample per segment of each trained rollout on `rollout_buffer`, so a compacted or forked rollout loses nothing. A
    group without any reward puts none. The process ends with `stop`, or when the trainer's process ends.
    """

    def __init__(
        self, spec: NeMoGymSpec, args: Any, processing_class: Any, *, lora_name: str | None = None
    ) -> None:
        if not args.vllm_server_base_url:
            raise ConfigError("AsyncGRPOConfig has no vllm_server_base_url; set it to the vLLM server")
        self._context = multiprocessing.get_context("spawn")
        self._spec = spec
        self._args = args
        self._tokenizer = tokenizer_of(processing_class)
        self._lora_name = lora_name
        self._channels = Channels(self._context, args.queue_maxsize)
        self._process: BaseProcess | None = None
        self._started = 0.0
        self.rollout_buffer = self._channels.samples
        self.metrics_queue = self._channels.metrics
        self.position = 0
        """First row to run; `follow` restores it when a training resumes."""

    def follow(self, trainer: Any) -> None:
        """Keep the position in the data in the trainer's checkpoints, and restore it when a training resumes."""
        from gymgate.integrations.trl.async_position import PositionCallback

        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, PositionCallback(self, trainer))  # before TRL's own, which starts the worker

    def newly_delivered(self) -> list[tuple[int, int]]:
        """Return the groups whose samples entered the queue since the last call, in its order, and how many each has."""
        groups = []
        with contextlib.suppress(queue.Empty):
            while True:
                groups.append(self._channels.delivered.get_nowait())
        return groups

    def start(self) -> None:
        """Start the process; `check_health` raises its errors. Idempotent."""
        if self._process is not None:
            return
        settings = self._settings().pickled()
        self._channels.stop.clear()
        self.newly_delivered()  # discards those of an earlier run
        self._channels.heartbeat.value = 0.0
        self._started = time.monotonic()
        self._process = self._context.Process(
            target=process_main, args=(settings, self._channels), name="gymgate-rollouts", daemon=True
        )
        self._process.start()

    def stop(self) -> None:
        """End the process within about `STOP_TIMEOUT_S`. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        self._channels.stop.set()
        process.join(STOP_TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join(5)
        if process.exitcode is not None:
            process.close()

    def update_model_version(self, model_version: int) -> None:
        """Set the version of the weights that the server samples with from now on."""
        self._channels.version.value = int(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the process; `StackLostError` if it died, or did not report for `stale_after_s`."""
        if self._channels.failed.is_set():
            try:
                raise from_wire(self._channels.failure.get(timeout=1.0))
            except queue.Empty:
                raise StackLostError("the rollout process failed; see its standard error") from None
        if self._process is None:
            return
        if (code := self._process.exitcode) is not None:
            raise StackLostError(f"the rollout process ended with exit code {code}; see its standard error")
        reported = self._channels.heartbeat.value
        silent_s = time.monotonic() - (reported or self._started)
        if silent_s > (stale_after_s if reported else max(stale_after_s, START_TIMEOUT_S)):
            raise StackLostError(
                f"the rollout process has not reported for {silent_s:.0f} s; see its standard error"
            )

    def _settings(self) -> ProcessSettings:
        args = self._args
        _ = self._spec.train_dataset  # made in this process, read in the other
        return ProcessSettings(
            spec=self._spec,
            tokenizer=self._tokenizer,
            base_url=args.vllm_server_base_url,
            sampling=trainer_sampling(args),
            chat_template_kwargs=args.chat_template_kwargs,
            group_size=args.num_generations,
            concurrency=args.max_inflight_tasks if args.max_inflight_tasks > 0 else 4 * args.num_generations,
            max_completion_len=args.max_completion_length,
            position=self.position,
            lora_name=self._lora_name,
        )
