"""A scripted endpoint with the ways in which models and endpoints answer: for `benchmarks agreement --scripted`.

A row's `user` names the behaviour, and then whatever tells the row apart; both sides pass it on. What is answered depends on the
conversation only: on how many answers it has beyond those that the row begins with.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

Json = dict[str, Any]
TEXT = "The answer is \\boxed{B}.\nAnswer: B"
OVERFLOW = "This model's maximum context length is 4096 tokens. However, you requested 4100 tokens"


class Refusal(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def say(text: Any = TEXT, finish: str = "stop", **fields: Any) -> Json:
    """A choice with a text."""
    return {"index": 0, "message": {"role": "assistant", "content": text, **fields}, "finish_reason": finish}


def call(
    body: Json, *calls: tuple[str, str], finish: str = "tool_calls", name: str = "", **fields: Any
) -> Json:
    """A choice with calls of the first tool, each with its id and arguments; a text where the request has no tools."""
    if not body.get("tools"):
        return say()
    name = name or body["tools"][0]["function"]["name"]
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, arguments in calls or [("a", CITY)]
    ]
    return say(None, finish, tool_calls=made, **fields)


CITY = '{"city": "Rome"}'
Behaviour = Callable[[Json, int, int], Json]
"""Takes the request, the number of answers in its conversation so far, and how often the row was asked for before."""


def first(choice: Callable[[Json], Json]) -> Behaviour:
    """This choice at first, then a text."""
    return lambda body, turn, _: choice(body) if turn == 0 else say()


def refused(status: int, message: str) -> Json:
    raise Refusal(status, message)


BEHAVIOURS: dict[str, Behaviour] = {
    "a text": first(lambda body: say()),
    "one call": first(call),
    "three calls, one by one": lambda body, turn, _: call(body, (f"c{turn}", CITY)) if turn < 3 else say(),
    "parallel calls": first(lambda body: call(body, ("a", CITY), ("b", '{"city": "Oslo"}'))),
    "reasoning and a text": first(lambda body: say(reasoning_content="let me see")),
    "`reasoning` and a text": first(lambda body: say(reasoning="let me see")),
    "only reasoning": first(lambda body: say(None, reasoning_content="let me see")),
    "only reasoning, cut": first(lambda body: say(None, "length", reasoning_content="let me see")),
    "empty": first(lambda body: say("")),
    "cut": first(lambda body: say("The answer", "length")),
    "refusal": first(lambda body: say(None, refusal="I cannot help with that.")),
    "content_filter": first(lambda body: say("The answer", "content_filter")),
    "text with `<think>`": first(lambda body: say(f"<think>let me see</think>\n\n{TEXT}")),
    "white space": first(lambda body: say(f" \n{TEXT}\n ")),
    "content as parts": first(lambda body: say([{"type": "text", "text": TEXT}])),
    "unknown fields": first(lambda body: say(annotations=[], audio=None, extra={"x": [1]})),
    "broken JSON": first(lambda body: call(body, ("a", '{"city": "Ro'))),
    "unknown tool": first(lambda body: call(body, name="no_such_tool")),
    "empty arguments": first(lambda body: call(body, ("a", "{}"))),
    "equal call ids": first(lambda body: call(body, ("a", CITY), ("a", '{"city": "Oslo"}'))),
    "a call that was cut": first(lambda body: call(body, finish="length")),
    "a call and `stop`": first(lambda body: call(body, finish="stop")),
    "overflow at once": first(lambda body: refused(400, OVERFLOW)),
    "overflow after a call": lambda body, turn, _: refused(400, OVERFLOW) if turn else call(body),
    "HTTP 500 once": lambda body, turn, asked: refused(500, "busy") if asked % 2 == 0 else say(),
    "HTTP 400": first(lambda body: refused(400, "this field is not allowed")),
}


class Endpoint:
    """Answers `/v1/chat/completions`."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.begun: dict[str, int] = {}
        """Answers with which each row begins."""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if not request.path.endswith("/chat/completions"):
            return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        body = await request.json()
        row = body.get("user") or "a text"
        answers = sum(message["role"] == "assistant" for message in body["messages"])
        self.begun[row] = min(answers, self.begun.get(row, answers))
        self.asked[row] += 1
        turn = answers - self.begun[row]
        try:
            choice = BEHAVIOURS[row.partition(" in ")[0]](body, turn, self.asked[row] - 1)
        except Refusal as refusal:
            error = {"object": "error", "message": str(refusal), "code": refusal.status}
            return web.json_response(error, status=refusal.status)
        usage = {"prompt_tokens": 10 + turn, "completion_tokens": 5, "total_tokens": 15 + turn}
        fields = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "scripted"}
        return web.json_response({**fields, "choices": [choice], "usage": usage})


@contextlib.contextmanager
def scripted_endpoint() -> Iterator[str]:
    """The endpoint's address, without `/v1`; it runs in a thread."""
    loop = asyncio.new_event_loop()
    server = web.Server(Endpoint().answer, loop=loop)
    listener = loop.run_until_complete(loop.create_server(server, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(server.shutdown(1), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
