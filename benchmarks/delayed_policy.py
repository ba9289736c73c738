"""A policy that takes its time: each call sleeps as long as the row's plan says, then calls the tool once more or answers.

The plan travels in the last user message, as `plan:[0.12, 1.4]`, seconds of each call. Run as a program it serves the
Responses API and prints its base URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from typing import Any

import uvloop
from aiohttp import web

from benchmarks.scripted_policy import program, responses_answer

MARK = "plan:"
LOW_S, HIGH_S, TURNS = 0.05, 2.0, 8


def make_plan(randomness: random.Random) -> list[float]:
    """Seconds of each of 1 to 8 calls: log-normal with nine in ten between 50 ms and 2 s, cut off there."""
    sigma = math.log(HIGH_S / LOW_S) / (2 * 1.645)
    mu = math.log(math.sqrt(LOW_S * HIGH_S))
    turns = randomness.randint(1, TURNS)
    return [round(min(max(randomness.lognormvariate(mu, sigma), LOW_S), HIGH_S), 4) for _ in range(turns)]


def row_with(plan: list[float], row: dict[str, Any]) -> dict[str, Any]:
    """The row with the plan as its user message."""
    params = row["responses_create_params"]
    message = {"role": "user", "content": MARK + json.dumps(plan)}
    return row | {"responses_create_params": params | {"input": [params["input"][0], message]}}


async def answer(request: web.Request) -> web.Response:
    body = json.loads(await request.read())
    items = body["input"]
    asked = sum(item.get("type") == "function_call_output" for item in items)
    text = next(json.dumps(item["content"]) for item in items if item.get("role") == "user")
    plan = json.loads(text[text.index(MARK) + len(MARK) : text.rindex("]") + 1].split("]")[0] + "]")
    await asyncio.sleep(plan[min(asked, len(plan) - 1)])
    last = asked + 1 >= len(plan)
    return web.json_response(responses_answer({**body, "input": [], "tools": [] if last else body["tools"]}))


async def serve() -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


def delayed_policy() -> contextlib.AbstractContextManager[str]:
    """Base URL of a delayed policy that lives as long as the block."""
    return program("benchmarks.delayed_policy")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve())
