"""A Python callable as a backend: a policy that lives in this process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.core.errors import GymgateError, PolicyError, described
from gymgate.core.json_server import shortened
from gymgate.core.retrying import Note, unnoted
from gymgate.gateway.backends.base import BackendAnswer, PolicyCallable
from gymgate.gateway.dialects.content import text_and_refusal
from gymgate.gateway.dialects.reading import fault_of, new_id
from gymgate.gateway.dialects.translate import translate_answer


class CallableBackend:
    """Answers calls by `fn(request)`, whose request is a dict in `dialect`.

    It may return the text, an assistant's message, or a whole answer of the chat-completions or Responses API; each as a
    dict or as an SDK's object.

    A coroutine function runs on the caller's loop. A plain function runs in a daemon thread of its own, so that
    a slow one holds up neither the loop nor the interpreter's exit; a call that is cancelled or times out
    abandons its thread.
    """

    dialect: Dialect
    model: str | None = None

    def __init__(self, fn: PolicyCallable, dialect: Dialect = "chat", timeout_s: float = 3600.0) -> None:
        self.dialect = dialect
        self._fn = fn
        self._name = getattr(fn, "__qualname__", None) or type(fn).__name__
        self._timeout_s = timeout_s
        self._is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004
        )

    def __repr__(self) -> str:
        return f"CallableBackend({self._name}, dialect={self.dialect!r})"

    async def call(
        self,
        body: dict[str, Any],
        *,
        raw: bytes | None = None,
        session: str | None = None,
        note: Note = unnoted,
    ) -> BackendAnswer:
        """See `Backend.call`. Whatever the callable raises fails this call alone."""
        task = asyncio.current_task()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                answer = await self._ask(dict(body))
        except GymgateError:
            raise
        except (Exception, asyncio.CancelledError, SystemExit, GeneratorExit) as error:
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if deadline.expired():
                raise self._error(f"gave no answer in {self._timeout_s:g} s") from error
            cause = error.__cause__ if isinstance(error, _Raised) else error
            raise self._error(f"raised {shortened(described(cause or error))}") from cause
        return self._check(answer, body)

    async def _ask(self, body: dict[str, Any]) -> Any:
        answer: Any = self._fn(body) if self._is_async else await _in_thread(self._fn, body)
        # In a task of its own: a policy that cancels its task fails the call, and nobody waits for an answer.
        return await asyncio.create_task(_awaited(answer)) if inspect.isawaitable(answer) else answer

    def _check(self, answer: Any, body: dict[str, Any]) -> BackendAnswer:
        answer, dialect = self._read(answer, body)
        if (fault := fault_of(answer, dialect)) is not None:
            raise self._error(fault)
        answer = translate_answer(answer, body, dialect, self.dialect) if dialect != self.dialect else answer
        try:
            return BackendAnswer(body=answer, raw=codec.dumps(answer))
        except ValueError as error:
            raise self._error(f"returned a dict that JSON cannot hold: {error}") from error

    def _read(self, answer: Any, body: dict[str, Any]) -> tuple[dict[str, Any], Dialect]:
        """Return what the function returned as an answer, and its dialect. Raises `PolicyError` for what is none."""
        kind = type(answer).__name__
        if isinstance(answer, str):
            return _completion({"content": answer}, body), "chat"
        if (dump := getattr(answer, "model_dump", None)) is not None:  # pydantic's, so openai's and litellm's
            try:
                answer = dump(mode="json", exclude_unset=True, warnings=False)
            except Exception as error:
                raise self._error(
                    f"returned {kind}, which cannot be dumped: {shortened(described(error))}"
                ) from error
        if not isinstance(answer, dict):
            raise self._error(f"returned {kind}; {_READABLE}")
        if "choices" in answer or "output" in answer:
            return answer, "chat" if "choices" in answer else "responses"
        if "content" not in answer and "tool_calls" not in answer:
            return answer, self.dialect
        return _completion(self._message(answer), body), "chat"

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an assistant's message with its text as a string. Raises `PolicyError` rather than lose a part of it."""
        if (role := message.get("role", "assistant")) != "assistant":
            raise self._error(f"returned a message with role {role!r}, not 'assistant'")
        content = message.get("content")
        if content is None or isinstance(content, str):
            return message
        if not isinstance(content, list):
            raise self._error(f"returned a message with content of type {type(content).__name__}")
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind not in ("text", "output_text", "refusal"):
                raise self._error(
                    f"returned a message with a content part of type {kind!r}; only text is read"
                )
        text, refusal = text_and_refusal(content)
        return {**message, "content": text, **({"refusal": refusal} if refusal else {})}

    def _error(self, what: str) -> PolicyError:
        return PolicyError(f"callable {self._name} {what}", endpoint=self._name, retryable=False)


_READABLE = (
    "return a string, a message ({'role': 'assistant', 'content': ...}), a chat completion or a response"
)


def _completion(message: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a chat completion in answer to `body`."""
    is_cut = (
        message.get("stop_reason") == "max_tokens"
    )  # of Anthropic's message, whose reason is its own field
    reason = "length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or "",
        "choices": [choice],
    }


class _Raised(Exception):
    """The callable raised in its thread or task; `__cause__` is what it raised."""


async def _awaited(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except SystemExit as error:  # which would leave its task, and end the loop
        raise _Raised from error


async def _in_thread(fn: Callable[[dict[str, Any]], Any], body: dict[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()  # a function finds what its caller has set, as on the loop

    def settle(outcome: tuple[Any, BaseException | None]) -> None:
        if not future.done():
            future.set_result(outcome)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = context.run(fn, body), None
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: somebody waits
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="gymgate-policy", daemon=True).start()
    result, failure = await future
    if isinstance(failure, GymgateError):
        raise failure
    if failure is not None:
        raise _Raised from failure
    return result
