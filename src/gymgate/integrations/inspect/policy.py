"""The policy of a rollout: Inspect's own model answers the agent's calls, through Inspect's agent bridge.

The bridge takes and gives the Responses API. It hands reasoning over as `<think>` text, and a provider's own data as a tag
in the text. Scorers of NeMo Gym read that text, so the agent gets reasoning items and plain text here. When the agent sends
an item back, the bridge gets what it gave.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from inspect_ai.agent import AgentBridge, AgentState, agent_bridge
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    ContentToolUse,
    GenerateConfig,
    GenerateInput,
    Model,
    ModelOutput,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import AsyncOpenAI
from openai.types.responses import Response

from gymgate.core.errors import PolicyError
from gymgate.core.json_server import CONTEXT_OVERFLOW

Item = dict[str, Any]
_NO_PARAMETERS = {"type": "object", "properties": {}}
_NOT_FORWARDED = ("metadata", "stream", "stream_options")
_OVERFLOW = "the conversation exceeds the model's context length"
_outputs: contextvars.ContextVar[list[ModelOutput]] = contextvars.ContextVar("gymgate_inspect_outputs")


class InspectPolicy:
    """Answers model calls of one rollout, given and returned as dicts of the Responses API.

    Inspect keeps the sample, its limits and its transcript in context variables. The calls arrive in tasks of the stack's
    connection, which know none of them, so each is answered in a task of `group` with the context that this object was made in.
    An exception of Inspect's model ends `group`, and with it the rollout; Inspect has retried by then.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._context = contextvars.copy_context()
        self._originals: dict[str, tuple[str, Item]] = {}
        """By id of an item that the agent got: its text, and the bridge's item in its place."""

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        answering = self._answer(request)
        try:
            task = self._group.create_task(answering, context=self._context.copy())
        except RuntimeError:  # the group ends
            answering.close()
            raise PolicyError("the sample has ended") from None
        answer = await task
        if answer is None:
            raise PolicyError(_OVERFLOW, status_code=400, retryable=False, code=CONTEXT_OVERFLOW)
        return answer

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the model's answer; `None` if the conversation does not fit the model, which the agent may handle."""
        outputs: list[ModelOutput] = []
        _outputs.set(outputs)
        response = await _client().post("/responses", cast_to=Response, body=self._for_bridge(request))
        output = outputs[-1]
        if output.stop_reason == "model_length":  # its text is an error message, not an answer to score
            return None
        return {
            **response.model_dump(mode="json", exclude_unset=True),
            "status": "incomplete" if response.incomplete_details else "completed",
            "output": list(self._for_agent(response, output)),
            "tools": request.get("tools") or [],
            "tool_choice": request.get("tool_choice") or "auto",
        }

    def _for_bridge(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the request as the bridge reads it: it fails on tools without a description and on nulls."""
        body = {
            key: value for key, value in request.items() if value is not None and key not in _NOT_FORWARDED
        }
        if tools := body.get("tools"):
            body["tools"] = [_complete_tool(tool) for tool in tools]
        if isinstance(items := body.get("input"), list):
            body["input"] = [self._restored(item) for item in items]
        return {**body, "model": "inspect"}

    def _restored(self, item: Item) -> Item:
        text, original = self._originals.get(item.get("id") or "", (None, item))
        return original if text == _text(item) else item

    def _for_agent(self, response: Response, output: ModelOutput) -> Iterator[Item]:
        """Yield the answer's items. The bridge gives one per text, reasoning or tool use, in order, then the tool calls."""
        items = [item.model_dump(mode="json", exclude_unset=True) for item in response.output]
        content = output.message.content
        parts = [ContentText(text=content)] if isinstance(content, str) else content
        parts = [part for part in parts if isinstance(part, ContentText | ContentReasoning | ContentToolUse)]
        for number, item in enumerate(items):
            part = parts[number] if number < len(parts) else None
            if isinstance(part, ContentReasoning):
                yield self._instead_of(item, _reasoning_item(part, item["id"]))
            elif isinstance(part, ContentText) and part.internal:
                content = [{**item["content"][0], "refusal" if part.refusal else "text": part.text}]
                yield self._instead_of(item, {**item, "content": content})
            elif not isinstance(part, ContentText) or part.text or len(items) == 1:
                yield {key: value for key, value in item.items() if (key, value) != ("namespace", None)}

    def _instead_of(self, item: Item, replacement: Item) -> Item:
        self._originals[replacement["id"]] = _text(replacement), item
        return replacement


@asynccontextmanager
async def bridged(state: AgentState) -> AsyncIterator[AgentBridge]:
    """Enter Inspect's agent bridge. Sampling settings of the row hold where the eval sets none."""
    async with agent_bridge(
        state, forward_generation_config=True, filter=_join_text, response_filter=_keep
    ) as bridge:
        yield bridge


async def _join_text(
    model: Model,
    messages: list[ChatMessage],
    tools: list[ToolInfo],
    tool_choice: ToolChoice | None,
    config: GenerateConfig,
) -> GenerateInput:
    """Give the model its own texts as it wrote them. Inspect's chat providers begin each part of a list with a new line."""
    return GenerateInput([_with_plain_text(message) for message in messages], tools, tool_choice, config)


def _with_plain_text(message: ChatMessage) -> ChatMessage:
    parts = message.content if isinstance(message, ChatMessageAssistant) else []
    if len(parts) != 1 or not isinstance(part := parts[0], ContentText) or part.internal or part.refusal:
        return message
    return message.model_copy(update={"content": part.text})


async def _keep(model: Any, output: ModelOutput, request: Any) -> None:
    """Keep what the model answered, before the bridge flattens it. A response filter; runs in the task of the call."""
    _outputs.get().append(output)


@functools.cache
def _client() -> AsyncOpenAI:
    """Return a client, for the bridge to intercept; nothing listens at its address."""
    return AsyncOpenAI(api_key="unused", base_url="http://127.0.0.1:1/v1", max_retries=0)


def _complete_tool(tool: Item) -> Item:
    if tool.get("type") != "function":
        return tool
    return {"description": None, **tool, "parameters": tool.get("parameters") or _NO_PARAMETERS}


def _reasoning_item(part: ContentReasoning, id: str) -> Item:
    text = part.summary if part.redacted else part.reasoning
    summary = [{"type": "summary_text", "text": text}] if text else []
    return {"type": "reasoning", "id": f"rs_{id}", "summary": summary}


def _text(item: Item) -> str:
    """Return an item's text, by which an item that the agent changed is told from one that it only sends back."""
    parts = item.get("summary") if item.get("type") == "reasoning" else item.get("content")
    if not isinstance(parts, list):
        return str(parts)
    return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
