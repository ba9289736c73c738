"""A policy server of its own process, to be killed: prints its port, answers chat completions.

After SIGUSR1 it looks like one on a node that has vanished.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal

from aiohttp import web

from support.vanishing import vanish_process

LATENCY_S = float(os.environ.get("LATENCY_S", "0.02"))
count = 0


async def handle(request: web.BaseRequest) -> web.Response:
    global count
    if request.path.endswith("/models"):
        return web.json_response({"data": [{"id": "m"}], "pid": os.getpid()})
    body = json.loads(await request.read())
    count += 1
    await asyncio.sleep(LATENCY_S)
    message = {"role": "assistant", "content": f"{os.getpid()} {body['messages'][-1]['content']}"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return web.json_response(
        {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    )


async def main() -> None:
    port = int(os.environ.get("PORT", "0"))
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(web.Server(handle), "127.0.0.1", port)
    loop.add_signal_handler(signal.SIGUSR1, vanish_process)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
