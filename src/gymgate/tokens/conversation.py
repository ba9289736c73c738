"""A policy that takes chat-completions requests and samples token ids.

The history is rendered once. Where a request's messages continue an earlier call of the same rollout, its prompt is that call's
exact ids plus the rendering of the new messages (`Renderer.bridge_to_next_turn` of the `renderers` package), so nothing the
policy sampled is ever tokenised again. Where they do not (compaction, a fork, a sub-agent), or where the renderer cannot bridge
(a template that drops earlier reasoning), the whole history is rendered anew and a new segment starts.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from gymgate.rollout.record import Segment
from gymgate.tokens.engines.base import Engine, Sample
from gymgate.tokens.gate import Gate
from gymgate.tokens.messages import (
    Message,
    assistant_message,
    chat_answer,
    history_hash,
    history_hashes,
    renderable,
    tool_specs,
)
from gymgate.tokens.requests import check_request
from gymgate.tokens.resuming import sample_resuming
from gymgate.tokens.sampling import SamplingGuard, requested_sampling
from gymgate.tokens.segments import TokenTurn, assemble, check_turn


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
    nothing: the agent gets an empty answer with finish reason `length`, and the rollout ends as truncated. `version` gives the
    version of the weights in use, for an engine that does not. `answers_with_ids` puts ids and logprobs into the
    agent's answers too, as vLLM's `return_token_ids` does, and so into the rollout's record; they grow with the square of a
    rollout's length there, and `segments` has them without.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        sampling: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        max_completion_len: int | None = None,
        version: Callable[[], int] | None = None,
        answers_with_ids: bool = False,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.max_model_len = max_model_len
        self.max_completion_len = max_completion_len
        self.version = version
        self.answers_with_ids = answers_with_ids
        self.gate = Gate()
        self.guard = SamplingGuard(sampling or {})
        self._encoding = threading.Lock()  # a fast tokenizer cannot encode on two threads at once

    def conversation(self) -> TokenConversation:
        """A policy for one rollout; pass it to `Stack.run` and read its `segments` afterwards."""
        return TokenConversation(self)

    def pause(self, wait_s: float = 0.0) -> int:
        """Hold new model calls (a weight update); those under way go on, or are resumed by their engine.

        Waits at most `wait_s` for those under way, blocking this thread, and returns how many still are.
        """
        return self.gate.close(wait_s)

    def resume(self) -> None:
        """Let held model calls go on."""
        self.gate.open()

    async def sample(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str) -> Sample:
        """Sample after `prompt_ids`, across pauses and weight updates."""
        return await sample_resuming(
            self.engine, self.gate, prompt_ids, sampling, session=session, version=self.version
        )

    def render(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """The ids of a whole history and the opening of the answer to it."""
        with self._encoding:
            rendered = self.renderer.render_ids(
                renderable(messages), tools=tool_specs(tools), add_generation_prompt=True
            )
        return list(rendered)

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: Sequence[Message],
        tools: list[Any] | None,
    ) -> list[int] | None:
        """The exact ids of an earlier call and the rendering of the messages after it; `None` if the renderer cannot."""
        seen = [*prompt_ids, *completion_ids]
        with self._encoding:
            bridge = self.renderer.bridge_to_next_turn(
                prompt_ids, completion_ids, renderable(messages), tools=tool_specs(tools)
            )
        if bridge is None or list(bridge.token_ids[: len(seen)]) != seen:
            return None
        return list(bridge.token_ids)


@dataclass(slots=True)
class _Call:
    """A model call, its ids kept once: those that its prompt shares with an earlier call are that call's."""

    earlier: _Call | None
    """The call whose ids the prompt extends."""
    added: array[int]
    """The prompt's ids after those of `earlier`."""
    completion: array[int]
    logprobs: array[float] | None
    policy_version: tuple[int, int] | None
    message_count: int

    def prompt_ids(self) -> list[int]:
        return [*(self.earlier.seen_ids() if self.earlier else ()), *self.added]

    def seen_ids(self) -> list[int]:
        """Prompt and completion."""
        chain: list[_Call] = [self]
        while (earlier := chain[-1].earlier) is not None:
            chain.append(earlier)
        return [token for call in reversed(chain) for part in (call.added, call.completion) for token in part]

    def seen_count(self) -> int:
        """How many ids `seen_ids` has."""
        count, call = 0, cast("_Call | None", self)
        while call is not None:
            count, call = count + len(call.added) + len(call.completion), call.earlier
        return count

    def turn(self) -> TokenTurn:
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return TokenTurn(self.prompt_ids(), list(self.completion), logprobs, self.policy_version)


@dataclass
class TokenConversation:
    """The model calls of one rollout: an async callable, chat-completions request in, answer out."""

    policy: TokenPolicy
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    _calls: list[_Call] = field(default_factory=list)
    _by_history: dict[int, _Call] = field(default_factory=dict)

    @property
    def turns(self) -> list[TokenTurn]:
        """Every model call, in the order they were answered; made anew each time."""
        return [call.turn() for call in self._calls]

    @property
    def segments(self) -> list[Segment]:
        """Training rows; see `gymgate.tokens.assemble`."""
        return assemble(self.turns)

    @property
    def rerendered(self) -> int:
        """Model calls, after the first, whose prompt was rendered anew instead of extended."""
        return sum(call.earlier is None for call in self._calls[1:])

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat-completions request."""
        check_request(request, self.policy.renderer)
        messages, tools = list(request["messages"]), request.get("tools") or None
        histories = history_hashes(messages, tools)
        prompt_ids, earlier = self._prompt(messages, tools, histories)
        sampling = self._sampling(request, len(prompt_ids))
        if sampling.get("max_tokens", 1) <= 0:
            return self._answer(request, tools, prompt_ids, Sample([], None, "length"))
        sample = await self.policy.sample(prompt_ids, sampling, session=self.session)
        check_turn(TokenTurn(prompt_ids, sample.token_ids, sample.logprobs))
        answer = self._answer(request, tools, prompt_ids, sample)
        call = _call(prompt_ids, earlier, sample, len(messages) + 1)
        self._calls.append(call)
        self._by_history[history_hash(histories[-1], answer["choices"][0]["message"])] = call
        return answer

    def _prompt(
        self, messages: list[Message], tools: list[Any] | None, histories: Sequence[int]
    ) -> tuple[list[int], _Call | None]:
        """The ids to show, and the earlier call that they extend: the longest whose messages these continue."""
        found = [self._by_history[history] for history in histories[:-1] if history in self._by_history]
        if found:
            earlier = found[-1]
            new = messages[earlier.message_count :]
            extended = self.policy.extend(earlier.prompt_ids(), list(earlier.completion), new, tools)
            if extended is not None:
                return extended, earlier
        return self.policy.render(messages, tools), None

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
            first = len(self._calls[0].added) if self._calls else prompt_length
            bounds.append(first + limit - prompt_length)
        return max(0, min(bounds)) if bounds else None

    def _answer(
        self, request: Mapping[str, Any], tools: list[Any] | None, prompt_ids: list[int], sample: Sample
    ) -> dict[str, Any]:
        parsed = self.policy.renderer.parse_response(
            list(sample.token_ids), tools=tool_specs(tools), prompt_ids=prompt_ids
        )
        number = len(self._calls)
        message = assistant_message(parsed, f"{self.session}_{number}")
        answer_id = f"chatcmpl-{self.session}-{number}"
        return chat_answer(
            answer_id, request, message, prompt_ids, sample, with_ids=self.policy.answers_with_ids
        )


def _call(prompt_ids: list[int], earlier: _Call | None, sample: Sample, message_count: int) -> _Call:
    known = earlier.seen_count() if earlier else 0
    logprobs = None if sample.logprobs is None else array("d", sample.logprobs)
    added, completion = array("I", prompt_ids[known:]), array("I", sample.token_ids)
    return _Call(earlier, added, completion, logprobs, sample.policy_version, message_count)
