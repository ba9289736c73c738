"""The engine over a `vllm.LLM` in this process, with a script in place of vLLM; tests/engine has it over a real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.errors import PolicyError, TokenDataError
from gymgate.stack.sync import LoopThread
from gymgate.tokens.engines import ColocatedEngine, Sample
from gymgate.tokens.engines import colocated as module
from gymgate.tokens.sampling import Gate, sample_resuming


class ScriptedVLLM:
    """An `LLMEngine` that samples id 7 at each step; a request ends after as many ids as its first prompt id says."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}
        self.batches: list[int] = []
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.on_step: Callable[[int], None] = lambda number: None

    def add_request(self, request_id: str, prompt: dict[str, list[int]], parameters: dict[str, Any]) -> None:
        self.threads.add(threading.get_ident())
        if parameters.get("min_p") == -1:
            raise ValueError("min_p must be in [0, 1]")
        self.requests[request_id] = [prompt["prompt_token_ids"][0], 0]

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            del self.requests[request_id]

    def step(self) -> list[Any]:
        self.threads.add(threading.get_ident())
        self.batches.append(len(self.requests))
        self.on_step(len(self.batches))
        ended = []
        for request_id, state in self.requests.items():
            state[1] += 1
            if state[1] >= state[0]:
                ended.append(request_id)
        return [self.output(request_id, self.requests.pop(request_id)[1]) for request_id in ended]

    @staticmethod
    def output(request_id: str, count: int) -> Any:
        ids = [7] * count
        logprobs = [{7: SimpleNamespace(logprob=-0.5 if count < 9 else float("nan"))} for _ in ids]
        reason = {5: "length", 6: "error"}.get(count, "stop")
        completion = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
        return SimpleNamespace(request_id=request_id, finished=True, outputs=[completion])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ScriptedVLLM:
    monkeypatch.setattr(module, "_parameters", dict)
    return ScriptedVLLM()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread() as made:
        yield made


def serve(
    vllm: ScriptedVLLM, loop: LoopThread, work: Callable[[ColocatedEngine], Coroutine[Any, Any, Any]]
) -> Any:
    """The work's result; vLLM runs on this thread meanwhile."""
    engine = ColocatedEngine(SimpleNamespace(llm_engine=vllm))
    return loop.call(work(engine), meanwhile=engine.serve_until)


async def ask(engine: ColocatedEngine, count: int, **sampling: Any) -> Sample:
    return await engine.generate([count, 1], sampling, session="s")


def test_a_request_joins_the_batch_at_the_next_step(vllm: ScriptedVLLM, loop: LoopThread) -> None:
    """Three turns of a short rollout beside one long answer; vLLM stays on the thread that serves."""
    both_asked = threading.Event()
    vllm.on_step = lambda number: both_asked.wait(30) or pytest.fail("nothing was asked")

    async def work(engine: ColocatedEngine) -> list[Sample]:
        async def turns() -> list[Sample]:
            return [await ask(engine, 2) for _ in range(3)]

        answers = asyncio.gather(ask(engine, 8), turns())
        await asyncio.sleep(0)  # both have asked
        both_asked.set()
        answer, rest = await answers
        return [answer, *rest]

    answer, *rest = serve(vllm, loop, work)
    assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([7] * 8, [-0.5] * 8, "stop")
    assert [sample.token_ids for sample in rest] == [[7, 7]] * 3
    assert max(vllm.batches) == 2
    assert vllm.threads == {threading.get_ident()}


def test_what_cannot_be_sampled_fails_alone(vllm: ScriptedVLLM, loop: LoopThread) -> None:
    async def work(engine: ColocatedEngine) -> list[Any]:
        checked = sample_resuming(engine, Gate(), [9, 1], {}, session="s")
        asked = ask(engine, 3, min_p=-1), ask(engine, 5), ask(engine, 6), checked
        return await asyncio.gather(*asked, return_exceptions=True)

    refused, cut, broken, unfit = serve(vllm, loop, work)
    assert isinstance(refused, PolicyError)
    assert "min_p must be in [0, 1]" in str(refused)
    assert cut.finish_reason == "length"
    assert isinstance(broken, PolicyError)
    assert isinstance(unfit, TokenDataError)


def test_a_cancelled_request_leaves_the_batch(vllm: ScriptedVLLM, loop: LoopThread) -> None:
    async def work(engine: ColocatedEngine) -> Sample:
        stepped, running = asyncio.Event(), asyncio.get_running_loop()
        vllm.on_step = lambda number: running.call_soon_threadsafe(stepped.set) and None
        given_up = asyncio.create_task(ask(engine, 10**9))
        await stepped.wait()
        given_up.cancel()
        return await ask(engine, 2)

    assert serve(vllm, loop, work).token_ids == [7, 7]
    assert len(vllm.aborted) == 1
    assert vllm.requests == {}


def test_what_is_left_when_the_work_ends_is_aborted(vllm: ScriptedVLLM, loop: LoopThread) -> None:
    async def work(engine: ColocatedEngine) -> None:
        stepped, running = asyncio.Event(), asyncio.get_running_loop()
        vllm.on_step = lambda number: running.call_soon_threadsafe(stepped.set) and None
        left.append(asyncio.create_task(ask(engine, 10**9)))
        await stepped.wait()

    left: list[Any] = []
    serve(vllm, loop, work)
    assert len(vllm.aborted) == 1
    assert vllm.requests == {}


def test_a_failing_vllm_ends_everything(vllm: ScriptedVLLM, loop: LoopThread) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise RuntimeError("CUDA out of memory")

    async def work(engine: ColocatedEngine) -> list[Any]:
        vllm.on_step = fail
        found.extend(await asyncio.gather(ask(engine, 9), ask(engine, 9), return_exceptions=True))
        return found

    found: list[Any] = []
    with pytest.raises(PolicyError, match="RuntimeError: CUDA out of memory"):
        serve(vllm, loop, work)
    assert vllm.requests == {}


def test_an_engine_that_is_dead_hides_nothing_of_why(vllm: ScriptedVLLM, loop: LoopThread) -> None:
    """It refuses to abort what it was sampling, too."""

    def die(number: int) -> None:
        vllm.abort_request = abort  # type: ignore[method-assign]
        raise RuntimeError("CUDA out of memory")

    def abort(request_ids: list[str]) -> None:
        raise RuntimeError("EngineDeadError")

    async def work(engine: ColocatedEngine) -> Any:
        vllm.on_step = die
        return await asyncio.gather(ask(engine, 9), return_exceptions=True)

    with pytest.raises(PolicyError, match="CUDA out of memory"):
        serve(vllm, loop, work)


def test_a_request_that_arrives_while_vllm_fails_fails_too(vllm: ScriptedVLLM, loop: LoopThread) -> None:
    """The caller goes on although the thread that served has ended."""
    engine = ColocatedEngine(SimpleNamespace(llm_engine=vllm))
    arrived = threading.Event()

    async def work() -> list[Any]:
        asked = [asyncio.create_task(ask(engine, 9))]

        async def another() -> None:
            asked.append(asyncio.create_task(ask(engine, 9)))
            await asyncio.sleep(0)  # it has asked
            arrived.set()

        def fail(number: int) -> None:
            asyncio.run_coroutine_threadsafe(another(), running)
            assert arrived.wait(30)
            raise RuntimeError("CUDA out of memory")

        running, vllm.on_step = asyncio.get_running_loop(), fail
        await asyncio.wait(asked)
        return await asyncio.gather(*asked, return_exceptions=True)

    future = loop.submit(work())
    with pytest.raises(PolicyError, match="CUDA out of memory"):
        engine.serve_until(future)
    assert [type(error) for error in future.result(10)] == [PolicyError, PolicyError]
