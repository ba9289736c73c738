"""A policy that takes chat-completions requests and samples token ids.

The history is rendered once. Where a request's messages continue an earlier call of the same rollout, its prompt is that call's
exact ids plus the rendering of the new messages (`Renderer.bridge_to_next_turn` of the `renderers` package), so nothing the
policy sampled is ever tokenised again. Where they do not (compaction, a fork, a sub-agent), or where the renderer cannot bridge
(a template that drops earlier reasoning), the whole history is rendered anew and a new segment starts.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gymgate.rollout.record import Segment
from gymgate.tokens.engines.base import Engine, Sample
from gymgate.tokens.gate import Gate
from gymgate.tokens.sampling import SamplingGuard, requested_sampling
from gymgate.tokens.segments import TokenTurn, assemble, check_turn

logger = logging.getLogger(__name__)

Message = dict[str, Any]


class Renderer(Protocol):
    """The methods used of a `renderers.Renderer`."""

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]: ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> Any: ...

    def get_stop_token_ids(self) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> Any: ...


class TokenPolicy:
    """One policy for many rollouts: an engine, a renderer, the trainer's sampling parameters.

    `sampling` wins over what a row asks for; a difference is reported once (see `SamplingGuard`). A call that would have no
    room within `max_model_len` (prompt and answer), or after `max_completion_len` ids beyond the rollout's first prompt, samples
    nothing: the agent gets an empty answer with finish reason `length`, and the rollout ends as truncated.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        sampling: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        max_completion_len: int | None = None,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.max_model_len = max_model_len
        self.max_completion_len = max_completion_len
        self.gate = Gate()
        self.guard = SamplingGuard(dict(sampling or {}))

    def conversation(self) -> TokenConversation:
        """A policy for one rollout; pass it to `Stack.run` and read its `segments` afterwards."""
        return TokenConversation(self)

    def pause(self) -> None:
        """Hold new model calls (a weight update); those under way go on, or are resumed by their engine."""
        self.gate.close()

    def resume(self) -> None:
        """Let held model calls go on."""
        self.gate.open()


@dataclass(slots=True)
class _Turn:
    turn: TokenTurn
    message_count: int
    bridged: bool


@dataclass
class TokenConversation:
    """The model calls of one rollout: an async callable, chat-completions request in, answer out."""

    policy: TokenPolicy
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    _turns: list[_Turn] = field(default_factory=list)
    _by_history: dict[int, _Turn] = field(default_factory=dict)

    @property
    def turns(self) -> list[TokenTurn]:
        """Every model call, in the order they were answered."""
        return [entry.turn for entry in self._turns]

    @property
    def segments(self) -> list[Segment]:
        """Training rows; see `gymgate.tokens.assemble`."""
        return assemble(self.turns)

    @property
    def rerendered(self) -> int:
        """Model calls, after the first, whose prompt was rendered anew instead of extended."""
        return sum(not entry.bridged for entry in self._turns[1:])

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat-completions request; the answer carries the ids as vLLM's `return_token_ids` does."""
        await self.policy.gate.wait()
        messages, tools = list(request["messages"]), request.get("tools") or None
        prompt_ids, bridged = self._prompt(messages, tools)
        sampling = self._sampling(request, len(prompt_ids))
        if sampling.get("max_tokens", 1) <= 0:
            return self._answer(request, tools, prompt_ids, Sample([], None, "length"))
        sample = await self.policy.engine.generate(prompt_ids, sampling, session=self.session)
        turn = check_turn(TokenTurn(prompt_ids, sample.token_ids, sample.logprobs, sample.policy_version))
        answer = self._answer(request, tools, prompt_ids, sample)
        self._remember(
            messages, tools, answer["choices"][0]["message"], _Turn(turn, len(messages) + 1, bridged)
        )
        return answer

    def _prompt(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[int], bool]:
        renderer, specs = self.policy.renderer, _tool_specs(tools)
        if earlier := self._earlier(messages, tools):
            bridge = renderer.bridge_to_next_turn(
                list(earlier.turn.prompt_ids),
                list(earlier.turn.completion_ids),
                _renderable(messages[earlier.message_count :]),
                tools=specs,
            )
            if bridge is not None:
                return list(bridge.token_ids), True
        return list(
            renderer.render_ids(_renderable(messages), tools=specs, add_generation_prompt=True)
        ), False

    def _earlier(self, messages: list[Message], tools: list[Any] | None) -> _Turn | None:
        """The longest earlier call whose messages, answer included, these messages continue."""
        found = None
        for history in _history_hashes(messages[:-1], tools):
            found = self._by_history.get(history, found)
        return found

    def _remember(
        self, messages: list[Message], tools: list[Any] | None, answer: Message, entry: _Turn
    ) -> None:
        self._turns.append(entry)
        *_, history = _history_hashes([*messages, answer], tools)
        self._by_history[history] = entry

    def _sampling(self, request: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        sampling = self.policy.guard.apply(requested_sampling(request))
        sampling["stop_token_ids"] = list(self.policy.renderer.get_stop_token_ids())
        if (room := self._room(prompt_length)) is not None:
            sampling["max_tokens"] = min(sampling.get("max_tokens", room), room)
        return sampling

    def _room(self, prompt_length: int) -> int | None:
        """Ids that may still be sampled; `None` without a bound."""
        bounds = []
        if (limit := self.policy.max_model_len) is not None:
            bounds.append(limit - prompt_length)
        if (limit := self.policy.max_completion_len) is not None:
            first = len(self._turns[0].turn.prompt_ids) if self._turns else prompt_length
            bounds.append(first + limit - prompt_length)
        return max(0, min(bounds)) if bounds else None

    def _answer(
        self, request: Mapping[str, Any], tools: list[Any] | None, prompt_ids: list[int], sample: Sample
    ) -> dict[str, Any]:
        parsed = self.policy.renderer.parse_response(
            list(sample.token_ids), tools=_tool_specs(tools), prompt_ids=prompt_ids
        )
        message, reason = _message(parsed, self.session, len(self._turns)), sample.finish_reason
        if message.get("tool_calls") and reason == "stop":
            finish = "tool_calls"
        else:
            finish = "length" if reason in ("length", "abort") else "stop"
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish,
            "token_ids": list(sample.token_ids),
        }
        choice["logprobs"] = _logprobs(sample)
        used = (len(prompt_ids), len(sample.token_ids))
        return {
            "id": f"chatcmpl-{self.session}-{len(self._turns)}",
            "object": "chat.completion",
            "created": 0,
            "model": request.get("model") or "policy",
            "choices": [choice],
            "prompt_token_ids": prompt_ids,
            "usage": {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)},
        }


def _message(parsed: Any, session: str, turn: int) -> Message:
    """A parsed completion as a chat message; malformed tool calls stay visible as text."""
    calls = [call for call in parsed.tool_calls or [] if str(call.status) == "ok" and call.name]
    broken = [call.raw for call in parsed.tool_calls or [] if call not in calls]
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, [parsed.content, *broken]))}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{session}_{turn}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
    return message


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value if value is not None else {})


def _logprobs(sample: Sample) -> dict[str, Any] | None:
    if sample.logprobs is None:
        return None
    pairs = zip(sample.token_ids, sample.logprobs, strict=True)
    return {"content": [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]}


def _renderable(messages: Sequence[Message]) -> list[Message]:
    """Messages as the renderer wants them: a content, tool-call arguments as objects, developer as system."""
    return [_renderable_message(message) for message in messages]


def _renderable_message(message: Message) -> Message:
    out = {name: value for name, value in message.items() if value is not None}
    out["content"] = out.get("content") or ""
    if out["role"] == "developer":
        out["role"] = "system"
    return out


def _tool_specs(tools: Iterable[Any] | None) -> list[Any] | None:
    return None if tools is None else [tool.get("function", tool) for tool in tools]


def _history_hashes(messages: Sequence[Message], tools: list[Any] | None) -> Iterable[int]:
    """One hash for each prefix of `messages`, equal for equal prefixes under equal tools."""
    history = hash(json.dumps(tools, sort_keys=True))
    for message in messages:
        known = {name: value for name, value in message.items() if value not in (None, [], "")}
        history = hash((history, json.dumps(known, sort_keys=True)))
        yield history
