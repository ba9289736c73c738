"""A policy that takes chat-completions requests and samples token ids.

The history is rendered once. Where a request's messages continue an earlier call of the same rollout, its prompt is that call's
exact ids plus the rendering of the new messages (`Renderer.bridge_to_next_turn` of the `renderers` package, or for a model that
has no renderer there, `extend_by_template`), so nothing the policy sampled is ever tokenised again. Where they do not
(compaction, a fork, a sub-agent), or where the renderer cannot bridge (a template that drops earlier reasoning), the whole
history is rendered anew and a new segment starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from gymgate.core.errors import ConfigError, MissingExtraError
from gymgate.rollouts.record import UNDELIVERED, ModelCall, Segment
from gymgate.tokens.engines.base import Engine, Sample
from gymgate.tokens.messages import (
    Message,
    assistant_message,
    chat_answer,
    check_request,
    history_hash,
    history_hashes,
    renderable,
    tool_specs,
)
from gymgate.tokens.sampling import Gate, SamplingGuard, requested_sampling, sample_resuming
from gymgate.tokens.segments import SampledCall, TokenTurn, longest_extended, segments_of
from gymgate.tokens.templates import Renderer, extend_by_template

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@cache
def _rendering_thread(pid: int) -> ThreadPoolExecutor:
    """One thread per process: its policies may share a tokenizer, which cannot encode on two threads at once."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="gymgate-render")


def make_renderer(
    tokenizer: Any,
    settings: str | Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Renderer:
    """Make the renderer that `settings` name (`qwen3`) or configures (`{"name": "qwen3", ...}`), by default the one that
    the `renderers` package has for the tokenizer's model.

    Logs a warning if it has none for that model. Raises `ConfigError` for a name, a config or chat template arguments
    that it refuses.
    """
    try:
        from pydantic import TypeAdapter
        from renderers import RendererConfig, config_from_name, create_renderer
    except ImportError as error:
        raise MissingExtraError(
            "renderers is not installed: pip install 'renderers[transformers]>=0.1.12'"
        ) from error
    model = str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))
    try:
        config = None
        if settings is not None:
            config = (
                config_from_name(settings)
                if isinstance(settings, str)
                else TypeAdapter(RendererConfig).validate_python(settings)
            )
        kwargs = dict(chat_template_kwargs or {}) or None
        renderer: Renderer = create_renderer(tokenizer, config, chat_template_kwargs=kwargs)
    except Exception as error:  # the package's own, pydantic's, and the hub's
        subject = f"no renderer for {model!r}" if settings is None else f"renderer {settings!r} for {model!r}"
        raise ConfigError(
            f"{subject}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    if settings is None and type(renderer).__name__ == "DefaultRenderer":
        logger.warning(
            "the renderers package has no renderer for %r: its default one parses no tool calls; set `renderer` to a name",
            model,
        )
    return renderer


@dataclass(eq=False)
class TokenPolicy:
    """One policy for many rollouts: an engine, a renderer, the trainer's sampling parameters.

    `sampling` wins over what a row asks for; a difference is reported once (see `SamplingGuard`). A call that would have no
    room within `max_model_len` (prompt and answer), or after `max_completion_len` ids beyond the first prompt of the rollout or
    of its segment, samples nothing: the agent gets an empty answer with finish reason `length`, and the rollout ends as
    truncated. `version` gives the version of the weights in use, for an engine that does not. `answers_with_ids` puts ids
    and logprobs into the agent's answers too, as vLLM's `return_token_ids` does, and so into the rollout's record; they grow
    with the square of a rollout's length there, and `segments` has them without.
    """

    engine: Engine
    renderer: Renderer
    _: KW_ONLY
    sampling: Mapping[str, Any] | None = None
    max_model_len: int | None = None
    max_completion_len: int | None = None
    version: Callable[[], int] | None = None
    answers_with_ids: bool = False
    gate: Gate = field(default_factory=Gate, init=False)
    guard: SamplingGuard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = SamplingGuard(self.sampling or {})

    def conversation(self) -> TokenConversation:
        """A policy for one rollout; pass it to `Stack.run` and read its `segments` afterwards."""
        return TokenConversation(self)

    def judge_conversation(self) -> TokenConversation:
        """A policy for one rollout's judges that are the same model; pass it to `Stack.run` as `judge_policy`.

        Its calls are sampled as a judge asks, and are no part of the rollout's `segments`. They wait for `resume` too.
        """
        judge = replace(self, sampling=None, max_completion_len=None)
        judge.gate = self.gate
        return judge.conversation()

    def pause(self, wait_s: float = 0.0) -> int:
        """Hold new model calls (a weight update); calls under way go on, or their engine resumes them.

        Waits at most `wait_s` for the calls under way, blocking this thread, and returns how many still are.
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

    async def beside_the_loop(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Render or parse in a thread: for many rollouts that would block the event loop."""
        thread = _rendering_thread(os.getpid())
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)

    def render(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """Return the ids of a whole history and the opening of the answer to it."""
        return list(
            self.renderer.render_ids(
                renderable(messages), tools=tool_specs(tools), add_generation_prompt=True
            )
        )

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: Sequence[Message],
        count: int,
        tools: list[Any] | None,
    ) -> list[int] | None:
        """Return an earlier call's exact ids and the rendering of the messages after its `count`; `None` if it cannot be."""
        seen, history, specs = [*prompt_ids, *completion_ids], renderable(messages), tool_specs(tools)
        bridge = self.renderer.bridge_to_next_turn(prompt_ids, completion_ids, history[count:], tools=specs)
        if bridge is None:
            return extend_by_template(self.renderer, prompt_ids, completion_ids, history, count, specs)
        if list(bridge.token_ids[: len(seen)]) != seen:
            return None
        return list(bridge.token_ids)


class _Prepared(NamedTuple):
    """A request as ids."""

    prompt_ids: list[int]
    earlier: SampledCall | None
    """The call that the prompt extends."""
    history: int
    """Hash of the request's messages."""


@dataclass
class TokenConversation:
    """The model calls of one rollout: an async callable, chat-completions request in, answer out."""

    policy: TokenPolicy
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    _calls: list[SampledCall] = field(default_factory=list)
    _by_history: dict[int, SampledCall] = field(default_factory=dict)
    _untrained: set[SampledCall] = field(default_factory=set)

    @property
    def turns(self) -> list[TokenTurn]:
        """Every model call with its whole prompt, in the order of answers; made anew at each access, and large."""
        return [call.turn() for call in list(self._calls)]

    @property
    def segments(self) -> list[Segment]:
        """Training rows, as `gymgate.tokens.assemble` makes them of `turns` that are not left out."""
        return segments_of(list(self._calls), self._untrained)

    def leave_out(self, calls: Iterable[ModelCall]) -> None:
        """Leave those of a rollout's calls out of `segments` whose answers its agent never got."""
        ids = {call.details[UNDELIVERED] for call in calls if UNDELIVERED in call.details}
        self._untrained = {call for number, call in enumerate(self._calls) if self._answer_id(number) in ids}

    def is_left_out(self, number: int) -> bool:
        """Whether the turn of this number is left out of `segments`."""
        return self._calls[number] in self._untrained

    @property
    def first_prompt_ids(self) -> list[int]:
        """The prompt of the first model call; empty without one."""
        return self._calls[0].prompt_ids() if self._calls else []

    @property
    def call_count(self) -> int:
        """The number of model calls that the engine answered."""
        return len(self._calls)

    @property
    def prefix_misses(self) -> int:
        """Model calls, after the first, whose prompt does not extend any earlier call's exact ids (drift)."""
        return sum(call.earlier is None for call in self._calls[1:])

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat-completions request."""
        check_request(request, self.policy.renderer)
        prepared = await self.policy.beside_the_loop(self._prepare, request)
        sampling = self._sampling(request, prepared)
        if sampling.get("max_tokens", 1) <= 0:
            sample = Sample([], None, "length")
            return await self.policy.beside_the_loop(self._answer, request, prepared.prompt_ids, sample)
        sample = await self.policy.sample(prepared.prompt_ids, sampling, session=self.session)
        return await self.policy.beside_the_loop(self._record, request, prepared, sample)

    def _prepare(self, request: Mapping[str, Any]) -> _Prepared:
        """Make the ids to show. They extend the call whose messages these continue, the longest one if there are several."""
        messages, tools = list(request["messages"]), request.get("tools") or None
        histories = history_hashes(messages, tools)
        counts = [count for count, history in enumerate(histories[:-1], 1) if history in self._by_history]
        if counts:
            earlier = self._by_history[histories[counts[-1] - 1]]
            ids = earlier.prompt_ids(), list(earlier.completion)
            extended = self.policy.extend(*ids, messages, counts[-1], tools)
            if extended is not None:
                return _Prepared(extended, earlier, histories[-1])
        prompt_ids = self.policy.render(messages, tools)
        return _Prepared(prompt_ids, longest_extended(self._calls, prompt_ids), histories[-1])

    def _record(self, request: Mapping[str, Any], prepared: _Prepared, sample: Sample) -> dict[str, Any]:
        """Keep the call and return its answer."""
        turn = TokenTurn(prepared.prompt_ids, sample.token_ids, sample.logprobs, sample.policy_version)
        answer = self._answer(request, prepared.prompt_ids, sample)
        call = SampledCall.after(prepared.earlier, turn)
        self._calls.append(call)
        self._by_history[history_hash(prepared.history, answer["choices"][0]["message"])] = call
        return answer

    def _sampling(self, request: Mapping[str, Any], prepared: _Prepared) -> dict[str, Any]:
        sampling = self.policy.guard.apply(requested_sampling(request))
        sampling["stop_token_ids"] = list(self.policy.renderer.get_stop_token_ids())
        if (room := self._room(prepared)) is not None:
            sampling["max_tokens"] = min(sampling.get("max_tokens", room), room)
        return sampling

    def _room(self, prepared: _Prepared) -> int | None:
        """Return how many ids may still be sampled; `None` without a bound."""
        bounds, prompt_length = [], len(prepared.prompt_ids)
        if (limit := self.policy.max_model_len) is not None:
            bounds.append(limit - prompt_length)
        if (limit := self.policy.max_completion_len) is not None:
            # After compaction, a segment's first prompt may be shorter than the rollout's.
            first = prompt_length if prepared.earlier is None else len(prepared.earlier.first().added)
            if self._calls:
                first = min(first, len(self._calls[0].added))
            bounds.append(first + limit - prompt_length)
        return max(0, min(bounds)) if bounds else None

    def _answer_id(self, number: int) -> str:
        return f"chatcmpl-{self.session}-{number}"

    def _answer(self, request: Mapping[str, Any], prompt_ids: list[int], sample: Sample) -> dict[str, Any]:
        parsed = self.policy.renderer.parse_response(
            list(sample.token_ids), tools=tool_specs(request.get("tools") or None), prompt_ids=prompt_ids
        )
        # An answer without ids has no place in a segment.
        number = len(self._calls) if sample.token_ids else -1
        message = assistant_message(parsed, f"{self.session}_{number}")
        return chat_answer(
            self._answer_id(number),
            request,
            message,
            prompt_ids,
            sample,
            with_ids=self.policy.answers_with_ids,
        )
