"""A thread that samples for every request there is, one id each per step; it can be paused and given new weights."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from examples.token_server.decoding import DecodingBatch
from examples.token_server.sampling import FinishReason, Generation

PauseMode = Literal["abort", "wait", "keep"]


class Scheduler:
    """Continuous batching: a request joins the running batch at the next step and leaves it when it is finished.

    The thread owns everything; other threads post commands, which it carries out between two steps. `version` counts weight
    updates. Requests that a pause keeps go on under the new weights, their cache made anew, and carry both versions.
    """

    def __init__(self, model: Any, max_batch: int = 64) -> None:
        self.model = model.eval()
        self.max_batch = max_batch
        self.version = 0
        self.steps = 0
        self.sampled = 0
        self.largest_batch = 0
        self.aborted = 0
        self.paused = False
        self._draining: list[concurrent.futures.Future[Any]] = []
        self._waiting: list[Generation] = []
        self._running: list[Generation] = []
        self._batch: DecodingBatch | None = None
        self._closed = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="token-server-sampler", daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """How many requests are in the batch, and how many wait for it."""
        return len(self._running), len(self._waiting)

    def submit(self, generation: Generation) -> None:
        """Sample for `generation` until its `done` is set."""
        self._commands.put(lambda: self._waiting.append(generation))

    def abort(self, generation: Generation) -> None:
        """Drop a request that nobody waits for any more."""

        def mark() -> None:
            generation.aborted = True

        self._commands.put(mark)

    def pause(self, mode: PauseMode) -> concurrent.futures.Future[None]:
        """Done when no step is made any more. New requests wait; running ones are aborted, finished first, or kept."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def command() -> None:
            if mode == "wait":
                self._draining.append(done)
                return
            self.paused = True
            if mode == "abort":
                self._abort_all()
            done.set_result(None)

        self._commands.put(command)
        return done

    def resume(self) -> concurrent.futures.Future[None]:
        """Go on."""

        def command() -> None:
            self.paused = False

        return self._between_steps(command)

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> concurrent.futures.Future[None]:
        """Put `state` in place between two steps. `ValueError`, and nothing is changed, if it does not fit the model."""
        return self._between_steps(lambda: self._load_weights(state))

    def finish_update(self) -> concurrent.futures.Future[int]:
        """The weights are complete: a new version, whose number is the result."""

        def command() -> int:
            self.version += 1
            return self.version

        return self._between_steps(command)

    def close(self) -> None:
        """End the thread; whatever is under way is aborted."""

        def command() -> None:
            self._abort_all()
            self._closed = True

        self._commands.put(command)
        self._thread.join(timeout=10)

    def _between_steps(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def command() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._commands.put(command)
        return done

    def _work(self) -> None:
        while not self._closed:
            self._carry_out()
            if self._closed or self._idle():
                continue
            try:
                with torch.inference_mode():
                    self._step()
            except Exception as error:
                self._fail_all(error)

    def _carry_out(self) -> None:
        """Every command that was posted; waits for one if there is nothing to sample."""
        wait = self._idle()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _idle(self) -> bool:
        if self._draining and not self._running:
            self.paused, drained, self._draining = True, self._draining, []
            for done in drained:
                done.set_result(None)
        return self.paused or not (self._running or self._waiting)

    def _step(self) -> None:
        """Admit, draw one id for every row, answer the finished, compute the next logits."""
        self._leave()
        if not self._draining:
            self._admit()
        if not self._running:
            return
        if self._batch is None:  # the weights changed
            self._batch = DecodingBatch(self.model, [[*g.prompt_ids, *g.token_ids] for g in self._running])
        self.steps += 1
        self.sampled += len(self._running)
        self.largest_batch = max(self.largest_batch, len(self._running))
        for row, generation in enumerate(self._running):
            generation.draw(self._batch.logits[row], self.version)
        self._leave()
        if self._running:
            self._batch.advance([generation.token_ids[-1] for generation in self._running])

    def _admit(self) -> None:
        for generation in self._waiting:
            if generation.aborted:
                self._finish(generation, "abort")
        self._waiting = [generation for generation in self._waiting if not generation.aborted]
        room = self.max_batch - len(self._running)
        joining, self._waiting = self._waiting[:room], self._waiting[room:]
        if not joining:
            return
        if self._batch is not None or not self._running:
            batch = DecodingBatch(self.model, [generation.prompt_ids for generation in joining])
            if self._batch is not None:
                self._batch.join(batch)
            else:
                self._batch = batch
        self._running += joining

    def _leave(self) -> None:
        """Answer the finished and drop the aborted."""
        staying = []
        for row, generation in enumerate(self._running):
            if generation.aborted or generation.finish_reason is not None:
                self._finish(generation, generation.finish_reason or "abort")
            else:
                staying.append(row)
        if len(staying) == len(self._running):
            return
        self._running = [self._running[row] for row in staying]
        if not staying:
            self._batch = None
        elif self._batch is not None:
            self._batch.keep(staying)

    def _load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        own = dict(self.model.named_parameters())
        for name, value in state.items():
            if name not in own:
                raise ValueError(f"the model has no parameter {name!r}")
            if own[name].shape != value.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, not {tuple(own[name].shape)}")
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)
        self._batch = None

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        generation.finish_reason = reason
        self.aborted += reason == "abort"
        if not generation.done.done():
            generation.done.set_result(generation)

    def _abort_all(self) -> None:
        for generation in [*self._running, *self._waiting]:
            self._finish(generation, "abort")
        self._running, self._waiting, self._batch = [], [], None

    def _fail_all(self, error: Exception) -> None:
        for generation in [*self._running, *self._waiting]:
            if not generation.done.done():
                generation.done.set_exception(error)
        self._running, self._waiting, self._batch = [], [], None
