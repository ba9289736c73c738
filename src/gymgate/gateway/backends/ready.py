"""Waiting until an endpoint answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import PolicyError
from gymgate.core.http_client import HTTPClient, Response
from gymgate.core.json_server import probe
from gymgate.gateway.backends.http import request_headers

POLL_S = 0.5
REMIND_S = 30.0


async def wait_until_ready(
    endpoint: HTTPEndpoint,
    within_s: float,
    progress: Callable[[str], None] = lambda message: None,
    *,
    every: bool = True,
    judge: str | None = None,
) -> dict[str, Response]:
    """Wait until every replica of the endpoint answers; at the deadline, or unless `every`, one is enough.

    Return each one's answer to the request for its models. Replicas that are missing at the deadline are named. With 0
    seconds each is asked once. `judge` names the judge whose endpoint it is; `None`: the policy's. Raises `PolicyError` if none
    answers.
    """
    urls = tuple(dict.fromkeys(endpoint.base_urls))
    whose = "the policy" if judge is None else f"judge {judge!r}"
    started = reminded = time.monotonic()
    missing = dict.fromkeys(urls, "")
    answered: dict[str, Response] = {}
    async with HTTPClient() as client:
        while True:
            results = await asyncio.gather(
                *(probe(f"{url}/models", client, request_headers(endpoint, url)) for url in missing)
            )
            results_by_url = dict(zip(missing, results, strict=True))
            # One that has answered is not asked again: by now it may have work to do.
            missing = {url: result for url, result in results_by_url.items() if isinstance(result, str)}
            answered |= {url: result for url, result in results_by_url.items() if not isinstance(result, str)}
            if not missing or (not every and answered):
                return answered
            reasons = "; ".join(f"{url}: {reason}" for url, reason in missing.items())
            now = time.monotonic()
            left_s = started + within_s - now
            if left_s <= 0:
                break
            if now - reminded >= REMIND_S or now - started < POLL_S:
                reminded = now
                progress(f"waiting for {whose}, {left_s:.0f} s at most ({reasons})")
            await asyncio.sleep(min(POLL_S, max(0.01, left_s)))
    if not answered:
        after = f" after {within_s:g} s" if within_s else ""
        raise PolicyError(
            f"no endpoint of {whose} answers{after} ({reasons}); start it, or wait for it: --wait-for-policy SECONDS "
            "(`wait_for_policy_s` in Python)",
            endpoint=endpoint.base_url,
            retryable=True,
        )
    progress(f"going on without {len(missing)} of {len(urls)} replicas ({reasons})")
    return answered
