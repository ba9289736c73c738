"""Questions and answers of one text, in each dialect."""

from __future__ import annotations

from typing import Any

from parts import codec


def question_of(text: str, model: str, dialect: str, *, stream: bool = False) -> dict[str, Any]:
    """Return the body of a request."""
    message = {"role": "user", "content": text}
    body: dict[str, Any] = {"model": model, ("input" if dialect == "responses" else "messages"): [message]}
    if dialect == "messages":
        body["max_tokens"] = 100
    return {**body, "stream": True} if stream else body


def question_in(body: dict[str, Any], dialect: str) -> str:
    """Return the text of a request's last message."""
    content = body["input" if dialect == "responses" else "messages"][-1]["content"]
    return content if isinstance(content, str) else str(content[0]["text"])


def answer_of(text: str, dialect: str) -> dict[str, Any]:
    """Return the body of an endpoint's answer."""
    if dialect == "chat":
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return {"id": text, "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": "i", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {
        **{"id": text, "object": "response", "created_at": 0, "model": "m", "status": "completed"},
        **{"output": [item], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
    }


def answer_in(body: bytes, dialect: str, *, stream: bool = False) -> str | None:
    """Return the text of an answer, plain or streamed; `None` for one that has none, as an error."""
    if stream:
        lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
        events = [codec.loads_own(line.encode()) for line in lines]
        if not events and body[:1] == b"{":  # the status said it already
            return None
        if dialect == "responses":
            ends = [event["response"] for event in events if event.get("type") == "response.completed"]
            return _text_of(ends[0], dialect) if ends else None
        if dialect == "chat":
            pieces = [
                choice["delta"].get("content") for event in events for choice in event.get("choices", ())
            ]
        else:
            pieces = [
                event["delta"].get("text") for event in events if event.get("type") == "content_block_delta"
            ]
        return "".join(piece for piece in pieces if piece) or None
    return _text_of(codec.loads_own(body), dialect)


def _text_of(answer: dict[str, Any], dialect: str) -> str | None:
    if "error" in answer and answer["error"] is not None:
        return None
    if dialect == "chat":
        return str(answer["choices"][0]["message"]["content"])
    content = answer["output"][0]["content"] if dialect == "responses" else answer["content"]
    return str(content[0]["text"])
