"""Usage, finish reasons, token data and error envelopes in the three dialects."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types.responses import ResponseUsage

from gymgate.core.config import Dialect
from gymgate.core.errors import TokenDataError
from gymgate.gateway.dialects import error_body, finish_reason_of, token_data_of, usage_of
from gymgate.gateway.dialects.usage import usage_for_chat, usage_for_responses
from gymgate.rollouts import Usage
from gymgate.tokens import TokenTurn, assemble

Json = dict[str, Any]


@pytest.mark.parametrize(
    ("dialect", "usage", "expected"),
    [
        ("chat", None, (None, None, None, None)),
        ("chat", {"prompt_tokens": 3, "completion_tokens": 0}, (3, 0, None, None)),
        (  # as xAI counts
            "chat",
            {
                "prompt_tokens": 32,
                "completion_tokens": 9,
                "total_tokens": 135,
                "completion_tokens_details": {"reasoning_tokens": 94},
            },
            (32, 103, None, 94),
        ),
        (
            "chat",
            {
                "prompt_tokens": 32,
                "completion_tokens": 103,
                "total_tokens": 135,
                "completion_tokens_details": {"reasoning_tokens": 94},
            },
            (32, 103, None, 94),
        ),
        (
            "chat",
            {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 1},
                "completion_tokens_details": {"reasoning_tokens": 1},
            },
            (3, 2, 1, 1),
        ),
        (
            "chat",
            {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "prompt_tokens_details": None,
                "reasoning_tokens": 2,
            },
            (3, 2, None, 2),
        ),
        (
            "responses",
            {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 2},
            (3, 2, 0, None),
        ),
        ("responses", {"input_tokens": "many"}, (None, None, None, None)),
        ("chat", {"prompt_tokens": 3, "completion_tokens": -1}, (3, None, None, None)),
    ],
)
def test_usage(dialect: Dialect, usage: Json | None, expected: tuple[int | None, ...]) -> None:
    names = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")
    assert usage_of({"usage": usage}, dialect) == Usage(**dict(zip(names, expected, strict=True)))


def test_an_unknown_count_is_none_in_the_record_and_0_for_the_agent() -> None:
    """`openai`'s types require integers; the releases from 2.54 on require `cache_write_tokens`."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    counts = usage_of({"usage": usage}, "chat")
    assert (counts.cached_tokens, counts.reasoning_tokens) == (None, None)
    made = ResponseUsage.model_validate(usage_for_responses(counts, usage))
    assert (made.input_tokens_details.cached_tokens, made.input_tokens_details.cache_write_tokens) == (0, 0)
    assert made.output_tokens_details.reasoning_tokens == 0
    given = {"input_tokens_details": {"cache_write_tokens": 7}}
    kept = usage_for_responses(counts, given)
    assert kept is not None
    assert kept["input_tokens_details"]["cache_write_tokens"] == 7


def test_an_endpoints_own_total_is_kept_and_no_detail_is_missing() -> None:
    given = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 9}
    for make, details in ((usage_for_responses, "input_tokens_details"), (usage_for_chat, "")):
        made = make(usage_of({"usage": given}, "chat"), given)
        assert made is not None
        assert made["total_tokens"] == 9
        assert not details or made[details] == {"cached_tokens": 0, "cache_write_tokens": 0}


@pytest.mark.parametrize(
    ("dialect", "answer", "expected"),
    [
        ("chat", {"choices": [{"finish_reason": "length"}]}, "length"),
        ("chat", {}, None),
        ("responses", {"status": "completed", "output": []}, "stop"),
        ("responses", {"output": [{"type": "function_call"}]}, "tool_calls"),
        (
            "responses",
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "length",
        ),
        ("responses", {"status": "failed"}, None),
    ],
)
def test_finish_reason(dialect: Dialect, answer: Json, expected: str | None) -> None:
    assert finish_reason_of(answer, dialect) == expected


ENTRIES = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -0.25}]
BUNDLE = {
    "prompt_token_ids": [1, 2],
    "generation_token_ids": ["7", "8"],
    "generation_log_probs": [-0.5, -0.25],
}


@pytest.mark.parametrize(
    ("dialect", "answer", "expected"),
    [
        ("chat", {"choices": [{"message": {"content": "x"}}]}, (None, None, None)),
        (
            "chat",
            {
                "prompt_token_ids": [1, 2],
                "choices": [{"token_ids": [7, 8], "logprobs": {"content": ENTRIES}}],
            },
            ([1, 2], [7, 8], [-0.5, -0.25]),
        ),
        ("chat", {"choices": [{"logprobs": {"content": ENTRIES}}]}, (None, [7, 8], [-0.5, -0.25])),
        (
            "chat",
            {"choices": [{"token_ids": [7], "logprobs": {"content": ENTRIES}}]},
            (None, [7], [-0.5, -0.25]),
        ),
        (
            "chat",
            {"choices": [{"logprobs": {"content": [{"token": "a", "logprob": -1}]}}]},
            (None, None, [-1.0]),
        ),
        ("chat", {"choices": [{"message": BUNDLE}]}, ([1, 2], [7, 8], [-0.5, -0.25])),
        ("responses", {"output": [{"type": "message"}, BUNDLE]}, ([1, 2], [7, 8], [-0.5, -0.25])),
        (
            "responses",
            {"output": [{"type": "message", "content": [{"type": "output_text", "logprobs": ENTRIES}]}]},
            (None, [7, 8], [-0.5, -0.25]),
        ),
        ("chat", {"choices": [{"message": {"generation_token_ids": [math.inf]}}]}, (None, None, None)),
        (
            "chat",
            {"choices": [{"logprobs": {"content": [{"token": f"token_id:{'7' * 5000}", "logprob": -1}]}}]},
            (None, None, [-1.0]),
        ),
    ],
)
def test_token_data(dialect: Dialect, answer: Json, expected: tuple[Any, ...]) -> None:
    assert token_data_of(answer, dialect) == expected


def test_whoever_trains_is_told_of_logprobs_that_do_not_fit_the_ids() -> None:
    """Left out of the record they would be logprobs that the endpoint did not give, which some trainers make up."""
    answer = {"prompt_token_ids": [1], "choices": [{"token_ids": [7], "logprobs": {"content": ENTRIES}}]}
    prompt_ids, completion_ids, logprobs = token_data_of(answer, "chat")
    assert prompt_ids is not None
    assert completion_ids is not None
    with pytest.raises(TokenDataError, match="2 logprobs for 1 completion ids"):
        assemble([TokenTurn(prompt_ids, completion_ids, logprobs)])


def test_error_bodies() -> None:
    assert error_body("responses", 404, "gone") == {
        "error": {"message": "gone", "type": "not_found_error", "param": None, "code": None}
    }
    assert error_body("chat", 400, "bad")["error"]["type"] == "invalid_request_error"
    for status, kind in ((400, "invalid_request_error"), (429, "rate_limit_error"), (502, "api_error")):
        body = error_body("messages", status, "m")
        assert body == {"type": "error", "error": {"type": kind, "message": "m"}}
