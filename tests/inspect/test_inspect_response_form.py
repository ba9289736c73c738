"""Answers that the gateway makes validate as `openai`'s `Response`, here in the release that Inspect needs."""

from __future__ import annotations

from support.response_form import check_every_answer


def test_every_answer_has_what_clients_and_the_specification_require() -> None:
    check_every_answer()
