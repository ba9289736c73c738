"""`RolloutWorker`: the trainer's side of asynchronous rollouts (contract: trl 1.16, `RolloutWorkerProtocol`)."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from typing import TYPE_CHECKING, Any

from gymgate.errors import ConfigError, GymgateError, StackLostError, from_wire
from gymgate.integrations.trl.async_child import child_main
from gymgate.integrations.trl.async_plan import Channels, Plan, now
from gymgate.integrations.trl.policy import tokenizer_of, trainer_sampling

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from gymgate.integrations.trl.spec import NeMoGymSpec

START_TIMEOUT_S = 300.0
"""For the process to come up, its imports included."""
STOP_TIMEOUT_S = 30.0
"""For the process to give the stack back, before it is killed."""


class RolloutWorker:
    """Rollouts in a process of their own, for `AsyncGRPOTrainer(rollout_worker=...)`. Made by `NeMoGymSpec.rollout_worker`.

    The process hides the accelerators, connects to the stack and samples at `args.vllm_server_base_url`. It puts one sample per
    segment of each scored rollout on `rollout_buffer`, so that of a compacted or forked rollout nothing is lost; groups without
    any score put none. It ends with `stop`, and with the trainer's process.
    """

    def __init__(
        self, spec: NeMoGymSpec, args: Any, processing_class: Any, *, lora_name: str | None = None
    ) -> None:
        if not args.vllm_server_base_url:
            raise ConfigError("AsyncGRPOConfig names no vllm_server_base_url")
        context = multiprocessing.get_context("spawn")
        self._context = context
        self._spec = spec
        self._args = args
        self._tokenizer = tokenizer_of(processing_class)
        self._lora_name = lora_name
        self._channels = Channels(context, args.queue_maxsize)
        self._process: BaseProcess | None = None
        self._started = 0.0
        self.rollout_buffer = self._channels.samples
        self.metrics_queue = self._channels.metrics
        self.position = 0
        """Row to start at; where training resumes, `follow` has it set."""

    def follow(self, trainer: Any) -> None:
        """Keep the position in the data in the trainer's checkpoints, and take it up where a training resumes."""
        from gymgate.integrations.trl.async_resume import PositionCallback

        trainer.callback_handler.callbacks.insert(
            0, PositionCallback(self, trainer)
        )  # before TRL's own start

    def newly_delivered(self) -> list[int]:
        """Groups whose samples came into the queue since the last call, in the order of the queue."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._channels.delivered.get_nowait())
        return found

    def start(self) -> None:
        """Start the process; what goes wrong in it `check_health` raises. Idempotent."""
        if self._process is not None:
            return
        plan = self._plan().pickled()
        self._channels.stop.clear()
        self.newly_delivered()  # of an earlier run
        self._channels.heartbeat.value = 0.0
        self._started = now()
        self._process = self._context.Process(
            target=child_main, args=(plan, self._channels), name="gymgate-rollouts", daemon=True
        )
        self._process.start()

    def stop(self) -> None:
        """End the process, within `STOP_TIMEOUT_S` and a little. Idempotent."""
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
        """The version of the weights that the server now samples with."""
        self._channels.version.value = int(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the process, or `StackLostError` if it died or showed no life for `stale_after_s` seconds."""
        if self._channels.failed.is_set():
            raise self._failure()
        if self._process is None:
            return
        if (code := self._process.exitcode) is not None:
            raise StackLostError(f"the rollouts' process ended with exit code {code}; see its standard error")
        alive = self._channels.heartbeat.value
        age = now() - (alive or self._started)
        if age > (stale_after_s if alive else max(stale_after_s, START_TIMEOUT_S)):
            raise StackLostError(f"the rollouts' process shows no life for {age:.0f} s")

    def _failure(self) -> GymgateError:
        try:
            return from_wire(self._channels.failure.get(timeout=1.0))
        except queue.Empty:
            return StackLostError("the rollouts' process failed; see its standard error")

    def _plan(self) -> Plan:
        args = self._args
        concurrency = args.max_inflight_tasks if args.max_inflight_tasks > 0 else 4 * args.num_generations
        _ = self._spec.train_dataset  # made here, read there
        return Plan(
            spec=self._spec,
            tokenizer=self._tokenizer,
            base_url=args.vllm_server_base_url,
            sampling=trainer_sampling(args),
            chat_template_kwargs=args.chat_template_kwargs,
            group_size=args.num_generations,
            concurrency=concurrency,
            max_completion_len=args.max_completion_length,
            position=self.position,
            lora_name=self._lora_name,
        )
