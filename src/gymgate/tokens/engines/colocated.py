"""A `vllm.LLM` in this process; requests join and leave its batch at any step (contract: vLLM 0.31, `LLMEngine`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gymgate.core.errors import GymgateError, PolicyError, described
from gymgate.tokens.engines.base import FinishReason, Sample


@dataclass(eq=False)
class _Request:
    prompt_ids: list[int]
    sampling: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Sample]
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def resolve(self, result: Sample | GymgateError) -> None:
        """Hand over the result from another thread."""
        self.loop.call_soon_threadsafe(self._set, result)

    def _set(self, result: Sample | GymgateError) -> None:
        if self.done.done():
            return
        if isinstance(result, Sample):
            self.done.set_result(result)
        else:
            self.done.set_exception(result)


class ColocatedEngine:
    """Samples with a `vllm.LLM` in this process.

    Any event loop may call `generate`. vLLM itself runs only in `serve_until`, on the thread that calls it, because CUDA
    devices are chosen per thread. A request joins the batch at vLLM's next step, as on a server. Start the `LLM` with
    `logprobs_mode="processed_logprobs"`, so that logprobs are of the distribution that was sampled from.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._arriving: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._running: dict[str, _Request] = {}

    @property
    def max_model_len(self) -> int:
        """Most ids of prompt and answer together."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`. Waits until a thread serves."""
        loop = asyncio.get_running_loop()
        request = _Request(list(prompt_ids), dict(sampling), loop, loop.create_future())
        self._arriving.put(request)
        return await request.done

    def serve_until(self, work: concurrent.futures.Future[Any]) -> None:
        """Sample what `generate` is asked for until `work` has ended.

        Raises `PolicyError`, also in every `generate` that has no answer, if vLLM fails. Requests whose caller was cancelled are
        aborted, and so are those that are left when `work` ends.
        """
        work.add_done_callback(lambda _: self._arriving.put(None))  # wakes this thread
        try:
            while not work.done():
                self._admit()
                self._abort([request for request in self._running.values() if request.done.cancelled()])
                if self._running:
                    for output in self.llm.llm_engine.step():
                        self._deliver(output)
        except Exception as error:
            failure = PolicyError(f"vLLM in this process failed: {described(error)}", retryable=False)
            for request in (*self._running.values(), *self._take_arrivals()):
                if request is not None:
                    request.resolve(failure)
            with contextlib.suppress(Exception):  # it may refuse this too, which would hide why it failed
                self._abort(list(self._running.values()))
            self._running.clear()
            raise failure from error
        finally:
            self._abort(list(self._running.values()))

    def _admit(self) -> None:
        """Give vLLM the requests that arrived; wait for one if none is running."""
        arrived = [] if self._running else [self._arriving.get()]
        for request in (*arrived, *self._take_arrivals()):
            if request is None or request.done.cancelled():
                continue
            try:
                prompt = {"prompt_token_ids": request.prompt_ids}
                self.llm.llm_engine.add_request(request.request_id, prompt, _parameters(request.sampling))
            except (ValueError, TypeError) as error:  # too long, or a parameter that vLLM refuses
                request.resolve(PolicyError(f"vLLM refused the request: {error}", retryable=False))
            else:
                self._running[request.request_id] = request

    def _take_arrivals(self) -> list[_Request | None]:
        """Take the requests that have arrived; this thread alone takes any."""
        return [self._arriving.get() for _ in range(self._arriving.qsize())]

    def _deliver(self, output: Any) -> None:
        if not output.finished or (request := self._running.pop(output.request_id, None)) is None:
            return
        try:
            request.resolve(_sample(output.outputs[0]))
        except GymgateError as error:
            request.resolve(error)

    def _abort(self, requests: Sequence[_Request]) -> None:
        if requests:
            self.llm.llm_engine.abort_request([request.request_id for request in requests])
        for request in requests:
            del self._running[request.request_id]


def _parameters(sampling: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = {name: value for name, value in sampling.items() if value is not None}
    return SamplingParams.from_optional(
        **{"max_tokens": None, **settings},
        logprobs=0,  # that of the sampled id alone
        detokenize=bool(settings.get("stop")),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sample(completion: Any) -> Sample:
    if completion.finish_reason == "error":
        raise PolicyError("vLLM in this process failed to sample a request; see its log")
    token_ids = list(completion.token_ids)
    logprobs = completion.logprobs and [
        step[token].logprob for token, step in zip(token_ids, completion.logprobs, strict=True)
    ]
    finish: FinishReason = (
        completion.finish_reason if completion.finish_reason in ("length", "abort") else "stop"
    )
    return Sample(token_ids, logprobs, finish)
