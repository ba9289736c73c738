"""How the policy's answers are sampled: with whose parameters, when, and across an engine's interruptions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gymgate.core.errors import GymgateError, PolicyError, described
from gymgate.tokens.engines.base import NEUTRAL, Engine, Sample
from gymgate.tokens.segments import TokenTurn, check_turn, version_span

logger = logging.getLogger(__name__)

ENDING: Final = ("max_tokens", "stop")
"""Parameters that only determine where an answer ends."""

NAMES: Final = (*NEUTRAL, *ENDING)
"""Body fields of a chat-completions request (vLLM's extras included) that decide what is sampled."""

_NO_NUMBERS: Final = ("logit_bias", "stop")

_SENT: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that an engine may otherwise take from the model's `generation_config.json`."""

MAX_RESUMES = 32
_WAIT_S = (0.05, 2.0)
"""Wait between an abort and its resumption, doubling from the first to the second."""


def requested_sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a chat-completions request, in the engines' names.

    Raises `PolicyError` for one that should be a number and is not, as an endpoint refuses it (400).
    """
    sampling = {name: request[name] for name in NAMES if request.get(name) is not None}
    if (limit := request.get("max_completion_tokens")) is not None:
        sampling["max_tokens"] = limit
    for name, value in sampling.items():
        if name not in _NO_NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise PolicyError(f"{name} must be a number, not {value!r}", status_code=400, retryable=False)
    return sampling


class SamplingGuard:
    """The trainer's sampling parameters. They override a row's, so that what is sampled is what the trainer assumes (on-policy).

    Where a trainer pins any parameter, those it does not pin are neutral: a row cannot bring in a `min_p` that the trainer
    does not know. A row still decides where its answers end: a smaller `max_tokens`, `stop`. Without pinned parameters
    (an evaluation) the row decides. Each parameter that a request asks for in vain is reported once.
    """

    def __init__(self, pinned: Mapping[str, Any]) -> None:
        self.pinned = {name: value for name, value in pinned.items() if value is not None}
        self._lock = threading.Lock()
        self._reported: set[str] = set()

    @property
    def overruled(self) -> frozenset[str]:
        """Parameters for which some request asked for another value."""
        return frozenset(self._reported)

    def apply(self, requested: Mapping[str, Any]) -> dict[str, Any]:
        """`requested` with the pinned parameters in place; a smaller `max_tokens` of the request is kept."""
        if not self.pinned:
            return dict(requested)
        fixed = {**{name: NEUTRAL[name] for name in _SENT}, **self.pinned}
        for name, value in requested.items():
            if name not in ENDING and not _same(name, value, ours := fixed.get(name, NEUTRAL[name])):
                self._report(name, value, ours)
        merged = {**{name: requested[name] for name in ENDING if name in requested}, **fixed}
        if "max_tokens" in requested and "max_tokens" in fixed:
            merged["max_tokens"] = min(requested["max_tokens"], fixed["max_tokens"])
        return merged

    def _report(self, name: str, theirs: Any, ours: Any) -> None:
        with self._lock:
            if name in self._reported:
                return
            self._reported.add(name)
        logger.warning(
            "rows ask for %s=%r; the trainer's %r is used instead (reported once)", name, theirs, ours
        )


def _same(name: str, theirs: Any, ours: Any) -> bool:
    """Whether two values mean the same; there are two ways to write "no top-k"."""
    return bool(theirs == ours or (name == "top_k" and theirs <= 0 and ours <= 0))


class Gate:
    """A gate that callers on any event loop pass, and any thread closes and opens. It is open at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._inside = 0

    @property
    def inside(self) -> int:
        """The number of callers that have passed and not left."""
        return self._inside

    def close(self, wait_s: float = 0.0) -> int:
        """Hold new callers; wait at most `wait_s` for those inside to leave, and return how many have not.

        With `wait_s` it blocks its thread, which must not be one whose event loop those inside need.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside, timeout=wait_s)
            return self._inside

    def open(self) -> None:
        """Let everyone through."""
        with self._changed:
            self._closed = False
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(_release, future)

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait until the gate is open, and be inside for the length of the block."""
        while (future := self._enter()) is not None:
            try:
                await future
            finally:
                with self._changed:
                    self._waiting.discard(future)
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _enter(self) -> asyncio.Future[None] | None:
        """Go inside if the gate is open, else return what to wait for."""
        with self._changed:
            if not self._closed:
                self._inside += 1
                return None
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            return future


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def sample_resuming(
    engine: Engine,
    gate: Gate,
    prompt_ids: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    session: str,
    version: Callable[[], int] | None = None,
) -> Sample:
    """Sample once. A part that the engine aborted (a weight update) is kept, and the rest is sampled after it.

    Every part waits at the gate. `version` stamps the parts of an engine that gives no policy versions, before and after.
    Raises `PolicyError` for an engine that fails or goes on aborting, `TokenDataError` for ids and logprobs that do not fit
    together.
    """
    done = Sample([], None, "abort")
    for attempt in range(MAX_RESUMES):
        async with gate.passing():
            before = version() if version else None
            prompt, rest = [*prompt_ids, *done.token_ids], _rest(sampling, len(done.token_ids))
            part = await _generate(engine, prompt, rest, session)
            if part.policy_version is None and version and before is not None:
                part = replace(part, policy_version=(before, version()))
        done = join(done, part) if attempt else part
        if done.finish_reason != "abort":
            return done
        if _rest(sampling, len(done.token_ids)).get("max_tokens", 1) <= 0:
            return replace(done, finish_reason="length")
        await asyncio.sleep(min(_WAIT_S[0] * 2**attempt, _WAIT_S[1]))
    raise PolicyError(f"the engine aborted a request {MAX_RESUMES} times in a row", retryable=False)


async def _generate(
    engine: Engine, prompt_ids: list[int], sampling: Mapping[str, Any], session: str
) -> Sample:
    """Sample once, and check the result. What goes wrong in the engine becomes a `PolicyError`."""
    try:
        sample = await engine.generate(prompt_ids, sampling, session=session)
    except GymgateError:
        raise
    except Exception as error:
        message = f"{type(engine).__name__} failed: {described(error)}"
        raise PolicyError(message, retryable=False) from error
    check_turn(TokenTurn(prompt_ids, sample.token_ids, sample.logprobs), type(engine).__name__)
    return sample


def join(first: Sample, second: Sample) -> Sample:
    """`second` sampled after `first`; logprobs stay `None` unless every id has one."""
    logprobs = [part.logprobs if part.token_ids else [] for part in (first, second)]
    versions = [part.policy_version for part in (first, second) if part.token_ids and part.policy_version]
    return Sample(
        first.token_ids + second.token_ids,
        None if logprobs[0] is None or logprobs[1] is None else logprobs[0] + logprobs[1],
        second.finish_reason,
        version_span(versions),
    )


def _rest(sampling: Mapping[str, Any], sampled: int) -> dict[str, Any]:
    """The parameters for what is left to sample."""
    left = dict(sampling)
    for name in ("max_tokens", "min_tokens"):
        if sampled and name in left:
            left[name] = left[name] - sampled if name == "max_tokens" else max(0, left[name] - sampled)
    return left
