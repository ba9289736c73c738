"""Whether an endpoint answers, and waiting until it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gymgate.config import HTTPEndpoint
from gymgate.errors import PolicyError
from gymgate.http_client import HTTPClient, HTTPFailure, Request

PROBE_S = 10.0
"""For one answer."""
POLL_S = 0.5
REMIND_S = 30.0


async def answers(url: str, client: HTTPClient) -> bool:
    """Whether anything but a gateway's or a server's error comes back; a refusal (a missing key) is an answer."""
    return await unreadiness(url, client) is None


async def unreadiness(url: str, client: HTTPClient) -> str | None:
    """Why a URL is not ready to be used, in a few words; `None` if it is."""
    try:
        response = await client.send(Request(url, method="GET"), timeout_s=PROBE_S)
    except TimeoutError:
        return f"no answer within {PROBE_S:g} s"
    except (HTTPFailure, ValueError) as error:
        return str(error)
    return f"status {response.status}" if response.status >= 500 else None


async def wait_until_ready(
    endpoint: HTTPEndpoint,
    within_s: float,
    say: Callable[[str], None] = lambda message: None,
    *,
    every: bool = True,
) -> None:
    """Until every replica of the endpoint answers; at the deadline, or unless `every`, one is enough.

    Those that are missing at the deadline are named. With 0 seconds each is asked once. Raises `PolicyError` if none answers.
    """
    async with HTTPClient() as client:
        missing = await _missing_at_deadline(endpoint.base_urls, within_s, client, say, every)
    if not missing or (not every and len(missing) < len(endpoint.base_urls)):
        return
    named = "; ".join(f"{url}: {reason}" for url, reason in missing.items())
    if len(missing) == len(endpoint.base_urls):
        after = f" after {within_s:g} s" if within_s else ""
        raise PolicyError(
            f"no policy endpoint answers{after} ({named}); start it, or wait for it: --wait-for-policy SECONDS",
            endpoint=endpoint.base_url,
            retryable=True,
        )
    say(f"going on without {len(missing)} of {len(endpoint.base_urls)} replicas ({named})")


async def _missing_at_deadline(
    urls: Sequence[str],
    within_s: float,
    client: HTTPClient,
    say: Callable[[str], None],
    every: bool,
) -> dict[str, str]:
    """Addresses that do not answer, and why."""
    started = last_said = time.monotonic()
    waiting = list(urls)
    while True:
        reasons = await asyncio.gather(*(unreadiness(f"{url}/models", client) for url in waiting))
        missing = {url: reason for url, reason in zip(waiting, reasons, strict=True) if reason is not None}
        waiting = list(missing)
        now = time.monotonic()
        enough = not missing if every else len(missing) < len(urls)
        if enough or now - started >= within_s:
            return missing
        if now - last_said >= REMIND_S or now - started < POLL_S:
            last_said = now
            named = "; ".join(f"{url}: {reason}" for url, reason in missing.items())
            say(f"waiting for the policy, {within_s - (now - started):.0f} s at most ({named})")
        await asyncio.sleep(min(POLL_S, max(0.01, within_s - (now - started))))
