"""Requests that a policy of token ids refuses, instead of leaving out what it cannot follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.errors import PolicyError
from gymgate.tokens import Sample, TokenPolicy
from gymgate.tokens.engines import CallableEngine

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


class Renderer:
    """Renders a message as one id; its template thinks."""

    config = SimpleNamespace(enable_thinking=True)

    def render_ids(self, messages: list[Any], **_: Any) -> list[int]:
        return list(range(1, len(messages) + 1))

    def parse_response(self, token_ids: list[int], **_: Any) -> Any:
        return SimpleNamespace(content="done", reasoning_content=None, tool_calls=[])

    def get_stop_token_ids(self) -> list[int]:
        return [0]

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> Any:
        return None


async def test_strict_is_not_written_into_the_prompt() -> None:
    """As in NeMo Gym's server for vLLM; most rows with tools set it. The rest is what chat templates get elsewhere."""
    rendered: list[Any] = []

    class Recorder(Renderer):
        def render_ids(self, messages: list[Any], **given: Any) -> list[int]:
            rendered.append(given["tools"])
            return super().render_ids(messages)

    engine = CallableEngine(lambda prompt_ids, sampling: Sample([7], [-0.5], "stop"))
    policy = TokenPolicy(engine, Recorder(), sampling={"temperature": 1.0})
    strict = {"type": "function", "function": {"strict": True, **TOOL["function"]}}
    await policy.conversation()({"messages": [{"role": "user", "content": "hi"}], "tools": [strict]})
    assert rendered == [[TOOL]]


async def ask(**fields: Any) -> list[Any]:
    """What the engine was asked."""
    asked: list[Any] = []

    def engine(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        asked.append(prompt_ids)
        return Sample([7], [-0.5], "stop")

    policy = TokenPolicy(CallableEngine(engine), Renderer(), sampling={"temperature": 1.0})
    await policy.conversation()({"messages": [{"role": "user", "content": "hi"}], **fields})
    return asked


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            r"messages\[0\]\.content=\{'type': 'image_url'\}",
        ),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": [IMAGE]}]}, "image_url"),
        ({"response_format": SCHEMA}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice='required'"),
        ({"tools": [TOOL], "tool_choice": "none"}, "tool_choice='none'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking=False",
        ),
        ({"chat_template_kwargs": {"other": 1}}, "other=1"),
        ({"n": 2}, "n=2"),
    ],
)
async def test_what_would_have_no_effect_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(PolicyError, match=named) as caught:
        await ask(**fields)
    assert caught.value.retryable is False


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"response_format": {"type": "text"}},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": None, "n": 1, "tool_choice": None, "response_format": None},
    ],
)
async def test_what_the_policy_does_anyway_is_accepted(fields: dict[str, Any]) -> None:
    assert await ask(**fields) == [[1]]


async def test_a_template_gets_texts_as_vllm_gives_them() -> None:
    """Text parts become one text; a template that takes texts would write the list's Python form into the prompt."""
    shown: list[Any] = []

    class Recording(Renderer):
        def render_ids(self, messages: list[Any], **_: Any) -> list[int]:
            shown.extend(messages)
            return [1]

    async def engine(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        return Sample([2], [-0.1], "stop")

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    policy = TokenPolicy(CallableEngine(engine), Recording())
    await policy.conversation()({"messages": [{"role": "user", "content": parts}]})
    assert shown == [{"role": "user", "content": "one\ntwo"}]
