"""Samples that an engine interrupted and took up again, possibly under new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymgate.errors import PolicyError
from gymgate.tokens.engines.base import Engine, Sample
from gymgate.tokens.gate import Gate

MAX_RESUMES = 32
_WAIT_S = (0.05, 2.0)
"""Between an abort and its resumption, doubling from the first to the second."""


async def sample_resuming(
    engine: Engine,
    gate: Gate,
    prompt_ids: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    session: str,
    version: Callable[[], int] | None = None,
) -> Sample:
    """One sample. A part that the engine aborted (a weight update) is kept, and the rest is sampled after it.

    Every part waits at the gate. `version` stamps the parts of an engine that gives no policy versions, before and after.
    Raises `PolicyError` for an engine that goes on aborting.
    """
    done = Sample([], None, "abort")
    for attempt in range(MAX_RESUMES):
        async with gate.passing():
            before = version() if version else None
            part = await engine.generate(
                [*prompt_ids, *done.token_ids], _rest(sampling, len(done.token_ids)), session=session
            )
            if part.policy_version is None and version and before is not None:
                part = replace(part, policy_version=(before, version()))
        done = joined(done, part) if attempt else part
        if done.finish_reason != "abort":
            return done
        if _rest(sampling, len(done.token_ids)).get("max_tokens", 1) <= 0:
            return replace(done, finish_reason="length")
        await asyncio.sleep(min(_WAIT_S[0] * 2**attempt, _WAIT_S[1]))
    raise PolicyError(f"the engine aborted a request {MAX_RESUMES} times in a row", retryable=False)


def joined(first: Sample, second: Sample) -> Sample:
    """`second` sampled after `first`; logprobs stay `None` unless every id has one."""
    logprobs = [part.logprobs if part.token_ids else [] for part in (first, second)]
    spans = [
        part.policy_version for part in (first, second) if part.token_ids and part.policy_version is not None
    ]
    return Sample(
        first.token_ids + second.token_ids,
        None if logprobs[0] is None or logprobs[1] is None else logprobs[0] + logprobs[1],
        second.finish_reason,
        (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None,
    )


def _rest(sampling: Mapping[str, Any], sampled: int) -> dict[str, Any]:
    """The parameters for what is left to sample."""
    left = dict(sampling)
    for name in ("max_tokens", "min_tokens"):
        if sampled and name in left:
            left[name] = left[name] - sampled if name == "max_tokens" else max(0, left[name] - sampled)
    return left
