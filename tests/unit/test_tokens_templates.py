"""Prompts that extend sampled ids through a chat template alone: 1 opens a turn, 2 ends one, 3 is the line break after it."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate.tokens.templates import extend_by_template

ROLES = {"user": 4, "assistant": 5, "tool": 6}


class Template:
    """A turn is `1 role words 2 3`; a message's words are numbers."""

    def __init__(self, *, closing: tuple[int, ...] = (2, 3), keeps_old_answers: bool = True) -> None:
        self.closing = closing
        self.keeps_old_answers = keeps_old_answers

    def render_ids(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        ids: list[int] = []
        for place, message in enumerate(messages):
            old = place < len(messages) - 1 and message["role"] == "assistant"
            words = [int(word) for word in message["content"].split()]
            kept = [] if old and not self.keeps_old_answers else words
            ids += [1, ROLES[message["role"]], *kept, *self.closing]
        return [*ids, 1, 5] if add_generation_prompt else ids

    def get_stop_token_ids(self) -> list[int]:
        return [2]


HISTORY = [
    {"role": "user", "content": "10"},
    {"role": "assistant", "content": "20 21"},
    {"role": "tool", "content": "30"},
]
PROMPT = [1, 4, 10, 2, 3, 1, 5]
NEW = [1, 6, 30, 2, 3, 1, 5]


@pytest.mark.parametrize(
    ("sampled", "closing"),
    [
        ([120, 121, 122, 2], [3]),  # it ended by itself, in other ids than encoding gives
        ([120, 121], [2, 3]),  # it was cut
        ([], [2, 3]),
    ],
)
def test_what_was_sampled_stays_and_the_turn_is_ended_once(sampled: list[int], closing: list[int]) -> None:
    ids = extend_by_template(Template(), PROMPT, sampled, HISTORY, 2, None)
    assert ids == [*PROMPT, *sampled, *closing, *NEW]


@pytest.mark.parametrize("template", [Template(keeps_old_answers=False), Template(closing=(3,))])
def test_a_template_that_drops_old_answers_or_ends_no_turn_cannot_extend(template: Template) -> None:
    assert extend_by_template(template, PROMPT, [120, 2], HISTORY, 2, None) is None


def test_a_stop_token_of_an_earlier_turn_does_not_end_the_answer() -> None:
    """A template may end the user's turn with a stop token and the assistant's with none."""

    class UsersOnly(Template):
        def render_ids(self, messages: list[Any], **options: Any) -> list[int]:
            rendered = [(message, Template.render_ids(self, [message])) for message in messages]
            ids = [
                token
                for message, turn in rendered
                for token in (turn if message["role"] != "assistant" else [*turn[:-2], 3])
            ]
            return [*ids, 1, 5] if options.get("add_generation_prompt") else ids

    assert extend_by_template(UsersOnly(), PROMPT, [120], HISTORY, 2, None) is None
