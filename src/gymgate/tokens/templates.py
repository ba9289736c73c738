"""Renderers, and the next prompt of a conversation for one that knows nothing but a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


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


def extend_by_template(
    renderer: Renderer,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    seen: int,
    tools: list[Any] | None,
) -> list[int] | None:
    """Append the rendering of `messages[seen:]` to the ids of an earlier call, whose answer is `messages[seen - 1]`.

        opening                              answer                  new
        <|im_start|>user ... assistant\\n     Hello <|im_end|> \\n     <|im_start|>tool ...

    The appended ids are the end of the answer's turn as the template writes it and what follows it. `None` where the template
    does not just append (it drops reasoning of earlier turns, say), or ends the turn with no stop token.
    """
    history = list(messages)
    opening = renderer.render_ids(history[: seen - 1], tools=tools, add_generation_prompt=True)
    answered = renderer.render_ids(history[:seen], tools=tools)
    whole = renderer.render_ids(history, tools=tools, add_generation_prompt=True)
    if answered[: len(opening)] != opening or whole[: len(answered)] != answered:
        return None
    stops = set(renderer.get_stop_token_ids())
    ends = [place for place in range(len(opening), len(answered)) if answered[place] in stops]
    if not ends:
        return None
    stopped = bool(completion_ids) and completion_ids[-1] in stops
    return [*prompt_ids, *completion_ids, *whole[ends[-1] + stopped :]]
