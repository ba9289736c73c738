"""A bare policy in a process of its own: the least work that makes an agent do one tool call and answer.

Run as a program it serves `/v1/responses` and `/v1/chat/completions` at any prefix and prints its base URL;
`scripted_policy()` starts and stops that program.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from gymgate.core.config import Dialect
from gymgate.gateway.dialects import encode_stream

ARGUMENTS = '{"city": "San Francisco"}'
TEXT = "It is cold in San Francisco."
IDS = itertools.count()
Handler = Callable[[web.Request], Awaitable[web.Response]]


def responses_answer(body: dict[str, Any]) -> dict[str, Any]:
    items = body["input"] if isinstance(body["input"], list) else []
    asked = any(item.get("type") == "function_call_output" for item in items)
    number = next(IDS)
    item: dict[str, Any]
    if body.get("tools") and not asked:
        name = body["tools"][0]["name"]
        item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": name}
        item |= {"arguments": ARGUMENTS, "status": "completed"}
    else:
        content = [{"type": "output_text", "text": TEXT, "annotations": []}]
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
        item |= {"content": content}
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "model": body.get("model") or "scripted",
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": 20,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 25,
        },
    }


def chat_answer(body: dict[str, Any]) -> dict[str, Any]:
    asked = any(message["role"] == "tool" for message in body["messages"])
    number = next(IDS)
    message: dict[str, Any] = {"role": "assistant", "content": TEXT}
    if body.get("tools") and not asked:
        function = {"name": body["tools"][0]["function"]["name"], "arguments": ARGUMENTS}
        message = {"role": "assistant", "content": None}
        message |= {"tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model") or "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
    }


async def answer(request: web.Request) -> web.Response:
    if request.method == "GET":
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
    body = json.loads(await request.read())
    dialect: Dialect = "responses" if request.path.endswith("/responses") else "chat"
    made = (responses_answer if dialect == "responses" else chat_answer)(body)
    if not body.get("stream"):
        return web.json_response(made)
    return web.Response(body=b"".join(encode_stream(made, dialect, body)), content_type="text/event-stream")


async def serve(handler: Handler = answer) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def program(module: str, *arguments: str) -> Iterator[str]:
    """The first line that a module prints, run as a program that lives as long as the block."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def scripted_policy() -> contextlib.AbstractContextManager[str]:
    """Base URL of a scripted policy that lives as long as the block."""
    return program("benchmarks.scripted_policy")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
