"""Whether an endpoint answers, and waiting until it does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

import aiohttp
from yarl import URL

from gymgate.config import HTTPEndpoint
from gymgate.errors import PolicyError
from gymgate.gateway.backends.http import new_session, proxy_for

PROBE_S = 10.0
"""For one answer."""
POLL_S = 0.5
REMIND_S = 30.0


async def answers(url: str, session: aiohttp.ClientSession) -> bool:
    """Whether anything but a gateway's or a server's error comes back; a refusal (a missing key) is an answer."""
    return await unreadiness(url, session) is None


async def unreadiness(url: str, session: aiohttp.ClientSession) -> str | None:
    """Why a URL is not ready to be used, in a few words; `None` if it is."""
    address = URL(url)
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    try:
        async with session.get(address, timeout=timeout, proxy=proxy_for(address)) as response:
            await response.read()
    except TimeoutError:
        return f"no answer within {PROBE_S:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        return os.strerror(number) if number else str(error) or type(error).__name__
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
    async with new_session() as session:
        missing = await _missing_at_deadline(endpoint.base_urls, within_s, session, say, every)
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
    session: aiohttp.ClientSession,
    say: Callable[[str], None],
    every: bool,
) -> dict[str, str]:
    """Addresses that do not answer, and why."""
    started = last_said = time.monotonic()
    waiting = list(urls)
    while True:
        reasons = await asyncio.gather(*(unreadiness(f"{url}/models", session) for url in waiting))
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
