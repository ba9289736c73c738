"""Engines in process: verl's server manager and a Python function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.errors import PolicyError, TokenDataError
from gymgate.tokens.engines import CallableEngine, Sample, ServerManagerEngine
from gymgate.tokens.sampling import Gate, sample_resuming


class Manager:
    """verl's `LLMServerClient.generate`, as its signature is; tests/training drives the real one."""

    def __init__(self, **output: Any) -> None:
        self.output = {"token_ids": [7, 8], "log_probs": [-0.1, -0.2], "stop_reason": "completed", **output}
        self.calls: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        self.calls.append({"request_id": request_id, "prompt_ids": prompt_ids, **sampling_params})
        return SimpleNamespace(**{"extra_fields": {}, **self.output})


async def test_verl_gets_a_sticky_request_and_its_steps_become_versions() -> None:
    manager = Manager(extra_fields={"global_steps": 5, "min_global_steps": 4, "max_global_steps": 5})
    sample = await ServerManagerEngine(manager).generate([1, 2], {"max_tokens": 9}, session="s")
    assert sample == Sample([7, 8], [-0.1, -0.2], "stop", (4, 5))
    assert manager.calls == [{"request_id": "s", "prompt_ids": [1, 2], "max_tokens": 9, "logprobs": True}]


@pytest.mark.parametrize(
    ("reason", "limit", "finish"),
    [
        ("completed", 3, "stop"),
        ("completed", 2, "length"),
        (None, 2, "length"),
        ("length", 9, "length"),
        ("aborted", 9, "abort"),
        ("abort", 2, "abort"),
    ],
)
async def test_verl_says_completed_for_stop_and_length(reason: str | None, limit: int, finish: str) -> None:
    engine = ServerManagerEngine(Manager(stop_reason=reason))
    assert (await engine.generate([1], {"max_tokens": limit}, session="s")).finish_reason == finish


async def test_verls_missing_logprobs_are_an_error_if_wanted_and_none_if_not() -> None:
    manager = Manager(log_probs=[])
    with pytest.raises(TokenDataError, match="calculate_log_probs"):
        await ServerManagerEngine(manager).generate([1], {}, session="s")
    assert (
        await ServerManagerEngine(manager, logprobs=False).generate([1], {}, session="s")
    ).logprobs is None


async def test_verls_lengths_are_checked() -> None:
    with pytest.raises(TokenDataError, match="1 logprobs for 2"):
        await sample_resuming(ServerManagerEngine(Manager(log_probs=[-1.0])), Gate(), [1], {}, session="s")


async def test_a_function_is_an_engine() -> None:
    def at_once(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        return Sample([*prompt_ids, sampling["max_tokens"]], None, "stop")

    async def later(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        return at_once(prompt_ids, sampling)

    for function in (at_once, later):
        assert (await CallableEngine(function).generate([3], {"max_tokens": 4}, session="")).token_ids == [
            3,
            4,
        ]


async def test_a_functions_failures_are_named() -> None:
    def fails(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        raise ValueError("no such state")

    with pytest.raises(PolicyError, match="ValueError: no such state"):
        await sample_resuming(CallableEngine(fails), Gate(), [1], {}, session="")
    with pytest.raises(TokenDataError, match="returned dict"):
        await CallableEngine(lambda ids, sampling: {}).generate([1], {}, session="")  # type: ignore[arg-type,return-value]
