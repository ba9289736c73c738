"""`python bystander_program.py URL`: ask a server for a hostile answer, and an honest one for hello again and again meanwhile.

Prints what came of it as JSON: the error, and the seconds and MiB that it took; the most CPU seconds of the loop's thread in one
call for hello, which waited for them whatever else the machine did.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from gymgate.core.errors import PolicyError
from gymgate.core.http_client import HTTPClient, Request
from gymgate.core.json_server import JSONServer


def peak_mib() -> float:
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(peak.split()[1]) / 1024


async def outcome(url: str) -> dict[str, Any]:
    async with HTTPClient() as client:
        server = JSONServer(Request(url), url, timeout_s=60, max_retries=0)

        async def ask(what: str) -> str | None:
            try:
                await server.post(client, json.dumps(what).encode(), {})
            except PolicyError as error:
                return error.message
            return None

        async def bystander() -> float:
            longest = 0.0
            while not asking.done():
                started = time.thread_time()
                assert await ask("hello") is None
                longest = max(longest, time.thread_time() - started)
            return longest

        for _ in range(100):
            await ask("hello")
        before, started = peak_mib(), time.monotonic()
        asking = asyncio.create_task(ask("attack"))
        longest = await bystander()
        return {
            "error": await asking,
            "seconds": time.monotonic() - started,
            "mib": peak_mib() - before,
            "longest_hold_s": longest,
        }


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(outcome(sys.argv[1]))))
